"""The result of a run that produces: what was ordered, what was published, and the verdict that follows."""

from collections import Counter, defaultdict
from functools import cached_property
from typing import Any

from labkit import steps
from labkit.faults import PRODUCER
from labkit.result import Run
from labkit.table import count, plain
from labkit.trace import Event
from labkit.verdict import BROKEN, HOLDS, unproven

#: every status that an order can end with -> its rule
OUTCOMES = {
    "once": "the order is there, and its event was published once",
    "repeated": "the order is there, and its event was published more than once under one id, which a consumer can recognise",
    "duplicated": "the order was recorded more than once, or its event was published under more than one id",
    "lost": "the order is there, and its event is nowhere",
    "stray": "an event was published, and there is no such order",
    "pending": "the order is there, and its event still waits in the outbox",
    "nothing": "no order and no event: whoever ordered has got an error, and may order again",
    "unknown": "the broker or the ledger could not be asked, or the broker did not answer and may still take the event",
}
_BROKEN = {"duplicated": ("{key} is there, and its event was published under {ids} ids", "{key} was recorded {rows} times"),
           "lost": ("{key} is there, and its event was lost",), "stray": ("an event was published for {key}, and there is no such order",)}
_OF_EVENTS = (steps.OUTBOX_ADD, steps.OUTBOX_MARK, steps.PUBLISH, steps.CONFIRM)


class Production(Run):
    """One run of producers, over. An order is a row of the ledger's effects; its event is the published message with the same effect key.

    What an earlier run left in the ledger is judged here only where this run had to do with its event.
    """

    STATUSES, SWEPT = OUTCOMES, ("orders", "events")
    role, ORDER = PRODUCER, "begun"
    columns = ("order", "committed", "events", "status")
    KEPT = "every order has its event"

    @cached_property
    def statuses(self) -> dict[str, str]:
        """Order key -> status, for each that was ordered, published or put into the outbox."""
        return {key: self._outcome(key) for key in self._keys}

    @cached_property
    def counts(self) -> dict[str, int]:
        """The numbers of this run: orders, events that the broker holds, ids that they have, and how many orders have each status."""
        effects, tally = self.facts.effects or {}, Counter(self.statuses.values())
        return {"keys": len(self._keys), "orders": sum(effects.get(key, 0) > 0 for key in self._keys), "events": len(self.published),
                "ids": len({event.message_id for event in self.published}), "outbox": sum(self.facts.outbox.values()),
                **{status: tally[status] for status in OUTCOMES}}

    @property
    def total(self) -> str:
        """The numbers in one line."""
        orders = None if self.facts.effects is None else self.counts["orders"]
        events = None if self.facts.where is None else self.counts["events"]
        return " · ".join([count(orders, "order"), count(events, "event"), *[f"{self.counts['outbox']} in the outbox"] * bool(self.counts["outbox"])])

    def pair(self, key: str) -> tuple[int, int]:
        """The orders and the events of one key."""
        return (self.facts.effects or {}).get(key, 0), len(self._ids(key))

    def row(self, key: str) -> list[Any]:
        """The values of one key, as `columns` names them."""
        return [key, "?" if self.facts.effects is None else self.facts.effects.get(key, 0), "?" if self.facts.where is None else len(self._ids(key)), self.statuses[key]]

    def title(self, key: str) -> str:
        """The key, its numbers and its status, in one line."""
        _, rows, events, status = self.row(key)
        return f"{plain(key)}: {'order' if rows else 'no order'}, {count(None if events == '?' else events, 'event')}, {status}"

    def missing(self, key: str) -> tuple[str, str, list[str], str] | None:
        """As in `Run`: the event, or the order."""
        return {"lost": ("broker", "lost", ["lost", "no event"], "no event at the broker"),
                "stray": ("ledger", "stray", ["stray", "no order"], "no order in the ledger"),
                "pending": ("ledger", "pending", ["pending", "not published"], "its event still waits in the outbox")}.get(self.statuses[key])

    @cached_property
    def _keys(self) -> list[str]:
        effects, left = self.facts.effects or {}, self.facts.outbox
        touched = [event.effect_key for event in (*self.events, *self.published) if event.effect_key]
        here = {event.effect_key for event in self.events if event.name in _OF_EVENTS}.union(self._all_ids, left)
        earlier = {key for key, rows in self.facts.inherited.items() if rows == effects.get(key)} - here
        return [key for key in dict.fromkeys([*touched, *effects, *left]) if key not in earlier]

    @cached_property
    def _in_doubt(self) -> set[str]:
        """The keys of events that a blocked broker has in its socket and does not read: it may still take them. So may one that was waited for to the deadline."""
        heard = [(event.effect_key, event.detail.get("outcome", "")) for event in self.events
                 if event.name in (steps.PUBLISH, steps.CONFIRM) and event.phase == steps.AFTER and event.detail.get("outcome") != "sent"]
        if self.facts.ending != "deadline" and not any("blocked" in outcome for _, outcome in heard):
            return set()
        told = dict(heard)
        return {event.effect_key for event in self.events if event.name == steps.PUBLISH and told.get(event.effect_key, "blocked") == "blocked"}

    @cached_property
    def _all_ids(self) -> dict[str, list[str]]:
        """Key -> the ids of its published events."""
        found = defaultdict(list)
        for event in self.published:
            found[event.effect_key].append(event.message_id)
        return found

    def _ids(self, key: str) -> list[str]:
        return self._all_ids.get(key, [])

    def _rows(self, key: str) -> int:
        """Returns how often this run recorded the order."""
        return self.facts.effects.get(key, 0) - self.facts.inherited.get(key, 0)

    def _outcome(self, key: str) -> str:
        if self.facts.effects is None or self.facts.where is None:
            return "unknown"
        ids = self._ids(key)
        if not self.facts.effects.get(key):
            return "stray" if ids else "nothing"
        if not ids and key in self._in_doubt:
            return "unknown"
        if self._rows(key) > 1 or len(set(ids)) > 1:
            return "duplicated"
        if len(ids) > 1:
            return "repeated"
        return "once" if ids else "pending" if self.facts.outbox.get(key) else "lost"

    @cached_property
    def _judgement(self) -> tuple[str, str, list[Event]]:
        for status, said in _BROKEN.items():
            for key in [key for key, ends in self.statuses.items() if ends == status]:
                ids, rows = len(set(self._ids(key))), self._rows(key)
                return BROKEN, said[-1 if rows > 1 else 0].format(key=plain(key), ids=ids, rows=rows), [event for event in self.events if event.effect_key == key]
        if self.facts.ending in ("max_deliveries", "gave up"):
            return BROKEN, self.facts.reason, self.events[-3:]
        return unproven(self) or (HOLDS, self._what_holds(), [])

    def _what_holds(self) -> str:
        said = [f"{self.counts[status]} of {len(self._keys)} {status}" for status in ("once", "repeated") if self.counts[status]]
        return (f"{self.KEPT}: " + ", ".join(said)) if said else "nothing was ordered, and nothing was published"
