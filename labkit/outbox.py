"""The outbox: events that are kept in the ledger's database, until a relay has published them. `publish_outbox` is one pass of it."""

import json
from typing import Any

from labkit import sql, steps
from labkit.access import Access
from labkit.errors import HandlerError
from labkit.message import Message, expect

_EMPTY_LOOKS = 500                                    # in one call of a relay, after which it is taken to loop for ever


class Outbox:
    """`shop.outbox`. Each method is a step, and raises LedgerError when the database is away."""

    def __init__(self, access: Access):
        self._access = access
        self.empty_looks = 0                          # one after the other, since whoever looks was called

    def add(self, event: Message) -> str:
        """Writes an event, to be published later; in the transaction of what it tells about.

        Returns "added", or "duplicate" when the same event is there. Raises HandlerError when another one has its id.
        """
        expect("shop.outbox.add", event)
        with self._step(steps.OUTBOX_ADD, event) as passage:
            told = json.dumps(event.as_dict())
            new = self._access.sql(sql.ADD_EVENT, (event.message_id, event.effect_key, told)).count
            if not new and self._access.sql(sql.FIND_EVENT, (event.message_id,)).first != (told,):
                raise HandlerError(f"The outbox holds another event with the id {event.message_id!r}.", "two events were given one id, or none of their own",
                                   'Give each its own: Message("order-1", "order-1:cancelled").')
            passage.outcome = "added" if new else "duplicate"
        return passage.outcome

    def waiting(self, limit: int = 100) -> list[Message]:
        """Returns the oldest events that are not marked, in the order in which they were added.

        Inside a transaction another relay waits here until this one's transaction has ended, so that no two publish the same.
        Raises HandlerError when it was asked too often for nothing.
        """
        if self.empty_looks >= _EMPTY_LOOKS:
            raise HandlerError(f"The outbox was empty at {_EMPTY_LOOKS} looks, one after the other.", "the relay has a loop of its own that does not end",
                               "Let it look once and return: it is called again.")
        with self._step(steps.OUTBOX_READ) as passage:
            if self._access.in_transaction:
                self._access.sql(sql.TAKE_TURN)
            rows = self._access.sql(sql.WAITING_EVENTS, (limit,)).rows
            passage.outcome = f"{len(rows)} waiting"
            self.empty_looks = 0 if rows else self.empty_looks + 1
        return [Message(**json.loads(row)) for row, in rows]

    def mark(self, event: Message) -> None:
        """Notes that an event was published."""
        with self._step(steps.OUTBOX_MARK, event):
            self._access.sql(sql.MARK_EVENT, (event.message_id,))

    def _step(self, name: str, event: Message | None = None) -> steps.Passage:
        about = {"event_id": event.message_id, "effect_key": event.effect_key} if event else {}
        return self._access.gate.step(name, self._access.delivery(), **about)


def publish_outbox(shop: Any) -> None:
    """Publishes what waits in the outbox, in its order, and marks what was confirmed: one pass of a relay."""
    with shop.ledger.transaction():
        for event in shop.outbox.waiting():
            if shop.publish(event) != "confirmed":
                break                                 # what was added later must not overtake it
            shop.outbox.mark(event)


def count_waiting(place: Any) -> dict[str, int]:
    """Returns the number of events that are not marked, for each effect key. Raises LedgerError."""
    return dict(place.settled(sql.COUNT_WAITING))
