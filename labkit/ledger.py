"""The ledger: a real SQLite database that holds the effects, and what decides whether one is new.

The statements are plain SQL in constants, so that a learner can read them and take them along. `effects` is the truth
that a run is judged by, whoever wrote its rows. `effect_keys` beside it is what `record_once` protects them with.
"""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from labkit import steps

SCHEMA = """
CREATE TABLE effects (
    id         INTEGER PRIMARY KEY,
    effect_key TEXT NOT NULL,
    detail     TEXT NOT NULL
);
CREATE TABLE effect_keys (
    effect_key TEXT PRIMARY KEY
);
CREATE TABLE inbox (
    consumer   TEXT NOT NULL,
    message_id TEXT NOT NULL,
    PRIMARY KEY (consumer, message_id)
);
CREATE TABLE deliveries (
    message_id TEXT NOT NULL,
    attempt    INTEGER NOT NULL,
    effect_key TEXT NOT NULL,
    worker     INTEGER NOT NULL,
    PRIMARY KEY (message_id, attempt)
);
"""

RECORD = "INSERT INTO effects (effect_key, detail) VALUES (?, ?)"
CLAIM_KEY = "INSERT INTO effect_keys (effect_key) VALUES (?) ON CONFLICT DO NOTHING"
FIND = "SELECT effect_key, detail FROM effects WHERE effect_key = ? ORDER BY id LIMIT 1"
REMEMBER = "INSERT INTO inbox (consumer, message_id) VALUES (?, ?) ON CONFLICT DO NOTHING"
LOG_DELIVERY = """
INSERT INTO deliveries (message_id, attempt, effect_key, worker)
SELECT ?, coalesce(max(attempt), 0) + 1, ?, ? FROM deliveries WHERE message_id = ?
RETURNING attempt
"""
_BUSY_S = 5                                           # how long a write waits for another's lock
COUNT_EFFECTS = "SELECT effect_key, count(*) FROM effects GROUP BY effect_key"


def create(path: str | os.PathLike) -> None:
    """Makes the database file, empty, in WAL mode: readers and one writer do not block each other."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(SCHEMA)
    connection.close()


def copy(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Copies a ledger as it stands, whether or not its last changes are in the main file yet."""
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)


def count_effects(path: str | os.PathLike) -> dict[str, int]:
    """Returns the number of effect rows for each effect key. Read-only."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return {_as_text(key): rows for key, rows in connection.execute(COUNT_EFFECTS)}


class Ledger:
    """The ledger as a handler sees it: `shop.ledger`. Each method is a step."""

    def __init__(self, path: str, gate: steps.Gate, current_delivery, consumer: str):
        """current_delivery() returns the delivery under way; consumer is the name in the inbox."""
        self._gate, self._delivery, self._consumer = gate, current_delivery, consumer
        self._db = sqlite3.connect(path, isolation_level=None, timeout=0 if gate.stepped else _BUSY_S)
        self._db.execute("PRAGMA synchronous = NORMAL")

    def record(self, effect_key: str, **detail: Any) -> None:
        """Writes an effect. Nothing stands against a second one for the same key."""
        with self._step(steps.LEDGER_RECORD, effect_key):
            self._sql(RECORD, (effect_key, json.dumps(detail)))

    def record_once(self, effect_key: str, **detail: Any) -> str:
        """Writes an effect and its unique key in one transaction.

        Returns "recorded", or "duplicate" when the key is there already; then nothing is written.
        """
        with self._step(steps.LEDGER_RECORD_ONCE, effect_key) as passage, _Transaction(self._db, self._sql):
            if self._sql(CLAIM_KEY, (effect_key,)).rowcount:
                self._sql(RECORD, (effect_key, json.dumps(detail)))
                passage.outcome = "recorded"
            else:
                passage.outcome = "duplicate"
        return passage.outcome

    def find(self, effect_key: str) -> dict[str, Any] | None:
        """Returns the first effect of this key as {"effect_key": …, **detail}, or None. Read-only."""
        with self._step(steps.LEDGER_FIND, effect_key) as passage:
            row = self._sql(FIND, (effect_key,)).fetchone()
            passage.outcome = "found" if row else "nothing"
        return row and {**json.loads(row[1]), "effect_key": row[0]}

    def remember(self, message_id: str) -> str:
        """Writes the inbox row (this consumer, message id). Returns "new", or "duplicate" when it is there already."""
        with self._step(steps.LEDGER_REMEMBER, None, message_id=message_id) as passage:
            new = self._sql(REMEMBER, (self._consumer, message_id)).rowcount
            passage.outcome = "new" if new else "duplicate"
        return passage.outcome

    def execute(self, statement: str, parameters: tuple = ()) -> list[tuple]:
        """Runs one SQL statement of your own and returns its rows, a tuple each."""
        with self._step(steps.LEDGER_EXECUTE, None, statement=statement):
            return self._sql(statement, parameters).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Makes what is written inside durable together, at its end, or not at all when the body raises."""
        delivery = self._delivery()
        with self._gate.step(steps.LEDGER_BEGIN, delivery):
            self._sql("BEGIN IMMEDIATE")
        try:
            yield
            with self._gate.step(steps.LEDGER_COMMIT, delivery):
                self._sql("COMMIT")
        except BaseException:
            if self._db.in_transaction:               # else the body ended it by a statement of its own
                with self._gate.step(steps.LEDGER_ROLLBACK, delivery):
                    self._sql("ROLLBACK")
            raise

    def log_delivery(self, message_id: str, effect_key: str, worker: int) -> int:
        """Writes one row to the delivery log, before any work, and returns which handing-over this is, 1 the first."""
        return self._sql(LOG_DELIVERY, (message_id, effect_key, worker, message_id)).fetchone()[0]

    def close(self) -> None:
        """Ends the connection to the database."""
        self._db.close()

    def _sql(self, statement: str, parameters: tuple = ()) -> sqlite3.Cursor:
        """Runs a statement. In a stepped run one that finds the database locked waits for another turn."""
        while True:
            try:
                return self._db.execute(statement, parameters)
            except sqlite3.OperationalError as error:
                if not self._gate.stepped or error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
                self._gate.wait(self._delivery())

    def _step(self, name: str, effect_key: str | None, **detail: Any) -> steps.Passage:
        delivery = self._delivery()
        if effect_key is not None and (delivery is None or effect_key != delivery.message.effect_key):
            detail["effect_key"] = _as_text(effect_key)
        return self._gate.step(name, delivery, **detail)


def _as_text(effect_key: Any) -> str:
    return effect_key if isinstance(effect_key, str) else repr(effect_key)


class _Transaction:
    """A transaction around the body of one step, unless the learner has one open already."""

    def __init__(self, db: sqlite3.Connection, sql):
        self._db, self._sql = db, sql

    def __enter__(self) -> None:
        self._own = not self._db.in_transaction
        if self._own:
            self._sql("BEGIN IMMEDIATE")

    def __exit__(self, kind, error, traceback) -> None:
        if not self._own:
            return
        try:
            if kind is None:
                self._sql("COMMIT")
        finally:
            if self._db.in_transaction:
                self._sql("ROLLBACK")
