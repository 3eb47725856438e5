"""A worker's access to the ledger's database: one connection, opened when it is needed, and one way to run a statement.

Everything of the shop that is kept in the database goes through here: the ledger, the statuses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from labkit import databases, sql, steps
from labkit.databases.answer import Answer
from labkit.errors import HandlerError, LedgerError, LedgerLocked


def text(name: str, value: Any) -> str:
    """Returns the value. Raises HandlerError when it is no text: the databases would differ in what they make of it."""
    if not isinstance(value, str):
        raise HandlerError(f"{name} is {value!r}.", "a text is expected, and this is not one", f"Write {name} as a text, such as str(…).")
    return value


class Access:
    """`sql` runs a statement; `atomic` makes several one, within a step."""

    def __init__(self, wire: dict[str, Any], gate: steps.Gate, current_delivery: Callable[[], Any]):
        """wire: the place of the ledger; current_delivery() returns the delivery under way."""
        self.gate, self.delivery = gate, current_delivery
        self._wire, self._connection = wire, None
        self._began = False                           # whether a transaction was open after the last statement that succeeded

    def sql(self, statement: str, parameters: tuple = ()) -> Answer:
        """Runs a statement and returns its answer. In a stepped run one that finds a lock waits for another turn.

        Raises LedgerError when the database is away; the next statement then tries to reach it anew.
        """
        while True:
            connection = self._reach()
            if sql.ENDS.match(statement):
                self._began = False                   # even if it fails: its body is over
            try:
                answer = connection.execute(statement, parameters)
            except LedgerLocked:
                if not self.gate.stepped:
                    raise
                self.gate.wait(self.delivery())
            else:
                self._began = connection.in_transaction
                return answer

    def check(self) -> None:
        """Raises LedgerError when the database is not there any more."""
        self._reach().check()

    def begin(self) -> None:
        """Opens a transaction. Where it is lost, nothing more is written until whoever opened it calls `leave`."""
        self.sql(self._reach().BEGIN)

    def leave(self) -> None:
        """Tells that the body of the transaction is over, however it ended."""
        self._began = False

    @property
    def in_transaction(self) -> bool:
        return self._connection is not None and self._connection.in_transaction

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Makes the body's statements one transaction, unless the learner has one open already."""
        if self.in_transaction:
            yield
            return
        self.begin()
        try:
            yield
            self.sql("COMMIT")
        except BaseException:
            if self.in_transaction:
                self.sql("ROLLBACK")
            self.leave()
            raise

    def abandon(self) -> bool:
        """Undoes the transaction that is open, and tells whether there was one, or one that was lost."""
        was_open = self._began or self.in_transaction
        if self.in_transaction:
            self._connection.execute("ROLLBACK")
        self.leave()
        return was_open

    def fileno(self) -> int | None:
        """Returns the descriptor that would hold this worker's connection open in a child, if there is one."""
        return self._connection.fileno() if self._connection and self._connection.fileno and not self._connection.broken else None

    def close(self) -> None:
        """Ends the connection."""
        if self._connection is not None:
            self._connection.close()

    def _reach(self) -> Any:
        if self._began and not self.in_transaction:   # what is left of its body must not become durable by itself
            raise LedgerError("The transaction was lost.", "the connection to the database ended, or a failed statement made the database undo it",
                              "Let the error leave the handler, or the `with` block; the delivery then begins anew.")
        if self._connection is None or self._connection.broken:
            self._connection = databases.connect(self._wire, self.gate.stepped)
        return self._connection
