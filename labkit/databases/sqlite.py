"""Ledgers in SQLite: one file each, in WAL mode, so that readers and the one writer do not block each other."""

import os
import pathlib
import shutil
import sqlite3
import uuid
from contextlib import closing
from typing import Any

from labkit import sql
from labkit.databases.answer import Answer
from labkit.errors import LedgerError, LedgerLocked, PlanError

_BUSY_S = 5                                           # how long a write waits for another's lock
_AWAY = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL,
         sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_PROTOCOL}
_BRING_BACK = "Bring its file back"
_NEXT_STEPS = {sqlite3.SQLITE_FULL: "Make room on the disk", sqlite3.SQLITE_READONLY: "Let its file be written"}
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


class SqliteHome:
    """Makes the ledgers of one lab as files in its folder."""

    def __init__(self, folder: str | os.PathLike):
        self._folder = pathlib.Path(folder)
        self._empty = self._folder / "empty.db"
        with closing(sqlite3.connect(self._empty, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(sql.SCHEMA)

    def new(self, earlier: "SqlitePlace | None" = None) -> "SqlitePlace":
        """Returns a new ledger: empty, or a copy of an earlier run's as it stands. Raises PlanError for one that is not there."""
        place = SqlitePlace(self._folder / f"ledger-{uuid.uuid4().hex[:8]}.db")
        if earlier is None:
            shutil.copyfile(self._empty, place)
        elif not isinstance(earlier, SqlitePlace):
            raise PlanError("This ledger cannot go on here.", "it is kept in PostgreSQL, and this lab keeps its ledgers in SQLite",
                            "Go on in a lab with the same ledger=….")
        else:
            earlier.save(place)
        return place

    def close(self) -> None:
        """Leaves the files to whoever removes the folder."""


class SqlitePlace(os.PathLike):
    """One ledger, a file; `sqlite3.connect(place)` opens it. `Error` is what a statement of one's own may raise."""

    Error = sqlite3.Error

    def __init__(self, path: str | os.PathLike):
        self._path = os.fspath(path)

    def __fspath__(self) -> str:
        return self._path

    def __repr__(self) -> str:
        return f"<ledger in SQLite, {os.path.basename(self._path)}>"

    @property
    def wire(self) -> dict[str, Any]:
        """What a worker needs to connect, as JSON values."""
        return {"path": self._path}

    def query(self, statement: str, parameters: tuple = ()) -> list[tuple]:
        """Returns the rows of one statement. Read-only. Raises LedgerError when there is no such file."""
        with closing(_open(self._path, "ro")) as db:
            try:
                return db.execute(statement, parameters).fetchall()
            except sqlite3.Error as error:            # that it is read-only here is the statement's own fault
                raise error if _code(error) == sqlite3.SQLITE_READONLY else _as_ours(error) from None

    def settled(self, statement: str) -> list[tuple]:
        """Returns the rows of one statement, once no dead worker can change them any more."""
        return self.query(statement)                  # a dead process holds no lock, and its transaction is undone

    def save(self, path: str | os.PathLike) -> None:
        """Writes a copy of the ledger as it stands, whether or not its last changes are in the main file yet."""
        with closing(_open(self._path, "rw")) as old, closing(sqlite3.connect(path)) as new:
            try:
                old.backup(new)
            except sqlite3.Error as error:
                raise _as_ours(error) from None


class SqliteConnection:
    """A worker's connection."""

    BEGIN = "BEGIN IMMEDIATE"                         # a transaction that reads first and writes later could not be waited for
    fileno = None                                     # a child of the worker holds nothing of it

    def __init__(self, path: str, stepped: bool):
        self._path, self._db = path, _open(path, "rw", 0 if stepped else _BUSY_S)
        self._inode = os.stat(path).st_ino
        self.execute("PRAGMA synchronous = NORMAL")
        self.close = self._db.close

    def execute(self, statement: str, parameters: tuple = ()) -> Answer:
        """Runs a statement. Raises LedgerLocked when another holds the lock, LedgerError when the file is of no use any more."""
        try:
            cursor = self._db.execute(statement, parameters)
            return Answer(cursor.fetchall(), cursor.rowcount)
        except sqlite3.Error as error:
            raise _as_ours(error) from None

    def check(self) -> None:
        """Raises LedgerError when the file is not there any more: SQLite itself would go on with one that was removed."""
        try:
            moved = os.stat(self._path).st_ino != self._inode
        except OSError:
            moved = True
        if moved:
            raise _away("the file was removed, or another took its place")

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction

    broken = False


def _open(path: str, mode: str, timeout_s: float = _BUSY_S) -> sqlite3.Connection:
    try:
        return sqlite3.connect(f"{pathlib.Path(path).absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=timeout_s)
    except sqlite3.Error as error:
        raise _as_ours(error) from None


def _as_ours(error: sqlite3.Error) -> Exception:
    """Returns what a locked or lost database means in labkit's words; an error of the statement itself stays as it is."""
    if _code(error) in _LOCKED:
        return LedgerLocked(why=str(error))
    return _away(str(error), _NEXT_STEPS.get(_code(error), _BRING_BACK)) if _code(error) in _AWAY else error


def _code(error: sqlite3.Error) -> int:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def _away(why: str, now: str = _BRING_BACK) -> LedgerError:
    return LedgerError("The ledger is away.", why, f"{now}; until then no effect can be checked.")
