"""A connection to a ledger in PostgreSQL: what labkit's statements and errors are there, and what a lost server means."""

import functools
import re
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from labkit import sql
from labkit.databases.answer import Answer
from labkit.errors import LedgerError, LedgerLocked

BUSY_MS = 5000                                        # how long a statement waits for another's lock
_STEPPED_MS = 1                                       # and in a stepped run, where the lock is free or its owner stands still
_CONNECT_S = 5
_LOST = (psycopg.OperationalError, psycopg.InterfaceError)                    # among others: their class of error tells
_IN_TRANSACTION = {psycopg.pq.TransactionStatus.ACTIVE, psycopg.pq.TransactionStatus.INTRANS, psycopg.pq.TransactionStatus.INERROR}
_ENDING = {"COMMIT": "commit", "END": "commit", "ROLLBACK": "rollback", "ABORT": "rollback"}
_OF_SAVEPOINTS = re.compile(r"\s*(SAVEPOINT|RELEASE|ROLLBACK)\b", re.IGNORECASE)
#: what holds no place for a value: texts, names, comments; then the places, and what psycopg would take for one
_PARTS = re.compile(r"""(?<!\w)[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"[^"]*"|--[^\n]*|/\*.*?\*/|(\$\w*\$).*?\1|\?|%""", re.DOTALL)
_AWAY = {"08", "28", "3D", "53", "58", "XX"}           # classes of errors: connection, password, database, resources, system

#: a backend that waits for a lock looks this often whether its client still lives; without it a dead worker's statement goes on
_CHECK = "client_connection_check_interval"
OPTIONS = f"-c {_CHECK}=50ms"
#: class of the error -> what now; by its words where the connection was refused, which tells no class
_NEXT_STEPS = [
    ("28", r"authentication failed|no pg_hba\.conf entry|no password supplied|role .* (does not exist|is not permitted)", "Write the right user and password into its URL"),
    ("42501", "permission denied for database", "Name a database that this user may connect to"),
    ("3D", "database .* does not exist", "Create that database, or write the name of another one into its URL"),
    ("53300", "too many (clients|connections)|connection slots are reserved", "Close what else is connected to it, or run with fewer workers"),
    ("53100", "No space left", "Make room on its disk"),
    ("", "resolve host|translate host", "Write the right host into its URL"),
    ("", "", "Start PostgreSQL again, or mend its URL"),
]


class PostgresConnection:
    """A worker's connection."""

    BEGIN = "BEGIN"

    def __init__(self, conninfo: str, schema: str, stepped: bool):
        self._stepped = stepped
        self._db = connect(conninfo, schema, lock_timeout=_STEPPED_MS if stepped else BUSY_MS)
        self._db.execute("SELECT pg_advisory_lock_shared(hashtext(%s))", (schema,))
        self.close, self.fileno = self._db.close, self._db.fileno

    def execute(self, statement: str, parameters: tuple = ()) -> Answer:
        """Runs a statement. Raises LedgerLocked when another holds the lock, LedgerError when the server is away.

        What PostgreSQL only warns of is an error, as in SQLite: to begin inside a transaction, to end one that there is not, and
        to commit one that it has given up. In a stepped run a statement that found a lock is tried again: a savepoint keeps its failure from undoing the transaction.
        """
        status, begins, ends = self._db.info.transaction_status, sql.BEGINS.match(statement), sql.ENDS.match(statement)
        if begins and self.in_transaction:
            raise psycopg.errors.ActiveSqlTransaction("cannot start a transaction within a transaction")
        if ends and not self.in_transaction and not self.broken:
            raise psycopg.errors.NoActiveSqlTransaction(f"cannot {_ENDING[ends[2].upper()]} - no transaction is active")
        # a savepoint around these would spoil what they are about
        saved = self._stepped and status == psycopg.pq.TransactionStatus.INTRANS and not ends and not _OF_SAVEPOINTS.match(statement)
        try:
            if saved:
                self._db.execute("SAVEPOINT turn")
            cursor = self._db.execute(for_psycopg(statement), parameters)
            if saved and self.in_transaction:
                self._db.execute("RELEASE turn")
        except _LOST as error:
            if saved and self.in_transaction:
                self._db.execute("ROLLBACK TO turn")
            raise as_ours(error) from None
        if ends and _ENDING[ends[2].upper()] == "commit" and cursor.statusmessage == "ROLLBACK":
            raise psycopg.errors.InFailedSqlTransaction("an earlier statement of this transaction failed, so PostgreSQL rolled all of it back")
        return Answer(rows(cursor), cursor.rowcount)

    def check(self) -> None:
        """Does nothing: the first statement tells whether the server is there."""

    @property
    def in_transaction(self) -> bool:
        return self._db.info.transaction_status in _IN_TRANSACTION

    @property
    def broken(self) -> bool:
        """Tells whether only a new connection can help."""
        return self._db.closed


def connect(conninfo: str, schema: str | None = None, **settings: Any) -> psycopg.Connection:
    """Returns a connection on which every statement outside a transaction is one of its own."""
    try:
        options = [conninfo_to_dict(conninfo)["options"], *(f"-c {name}={value}" for name, value in settings.items())]
        if schema:
            options.append(f"-c search_path={schema}")
        return psycopg.connect(conninfo, autocommit=True, connect_timeout=_CONNECT_S, options=" ".join(options))
    except psycopg.OperationalError as error:
        raise as_ours(error) from None


@functools.lru_cache(maxsize=256)
def for_psycopg(statement: str) -> str:
    """Returns the statement with %s where it has ? as a place for a value."""
    return _PARTS.sub(lambda found: {"?": "%s", "%": "%%"}.get(found[0]) or found[0].replace("%", "%%"), statement)


def rows(cursor: psycopg.Cursor) -> list[tuple]:
    return cursor.fetchall() if cursor.description else []


def as_ours(error: psycopg.Error) -> Exception:
    """Returns what a lock or a lost server means in labkit's words. libpq puts no password into its errors."""
    if isinstance(error, (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)):
        return LedgerLocked(why=str(error).splitlines()[0])
    lost = error.sqlstate[:2] in _AWAY or error.sqlstate[:3] == "57P" if error.sqlstate else isinstance(error, _LOST)
    if not lost:
        return error                                  # of the statement itself
    text = str(error).strip()
    if _CHECK in text:
        return LedgerError("This PostgreSQL does not look whether a worker still lives.", f"it does not take {_CHECK}: it is older than 14, or has a pooler before it",
                           "Name a PostgreSQL 14 or newer itself; or: docker compose --profile postgres up -d postgres")
    now = next(now for state, words, now in _NEXT_STEPS if (error.sqlstate.startswith(state) if error.sqlstate else re.search(words, text)))
    return LedgerError("The ledger is away.", text.splitlines()[0], f"{now}; until then no effect can be checked.")
