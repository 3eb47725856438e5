"""The terminal records: what the automatic route could not settle, kept in the ledger's database until a person has decided."""

from typing import Any

from labkit import sql
from labkit.access import Access, text
from labkit.message import Message


class Terminal:
    """`shop.terminal`. A record is written by `delivery.park`. Raises LedgerError when the database is away."""

    def __init__(self, access: Access):
        self._access = access

    def record(self, delivery: Any, reason: str, required_check: str, route: str, owner: str | None) -> str:
        """Writes the record of this message, one for a message and its effect. Returns "recorded", or "there already".

        Raises HandlerError for what is no text.
        """
        for name, value in (("required_check", required_check), ("route", route), *[("owner", owner)] * (owner is not None)):
            text(name, value)
        message = delivery.message
        new = self._access.sql(sql.WRITE_RECORD, (message.message_id, message.effect_key, route, reason, required_check, owner, delivery.attempt)).count
        return "recorded" if new else "there already"

    def holds(self, message: Message) -> bool:
        """Tells whether there is a record of this message."""
        return bool(self._access.sql(sql.FIND_RECORD, (message.message_id, message.effect_key)).rows)


def records(place: Any) -> list[dict[str, Any]]:
    """Returns the records, the oldest first, as dictionaries of their columns, once no dead worker can add one. Raises LedgerError."""
    return _named(place.settled(sql.ALL_RECORDS))


def records_so_far(place: Any) -> list[dict[str, Any]]:
    """Returns the same as it stands while workers write."""
    return _named(place.query(sql.ALL_RECORDS))


def _named(rows: list[tuple]) -> list[dict[str, Any]]:
    return [dict(zip(sql.RECORD_COLUMNS, row)) for row in rows]
