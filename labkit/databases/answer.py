"""What the database said to a statement, the same for each database, and read to its end: SQLite commits an INSERT … RETURNING there."""

from typing import NamedTuple


class Answer(NamedTuple):
    """rows: what it gave back; count: how many rows it wrote."""

    rows: list[tuple]
    count: int

    @property
    def first(self) -> tuple | None:
        return self.rows[0] if self.rows else None
