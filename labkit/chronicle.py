"""The chronicle of one run: its events in order, and what they say about copies, handlers and errors.

Takes in what the workers wrote to their traces and what the supervisor notes beside it.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from labkit import origin, steps
from labkit.account import Account
from labkit.message import UNREADABLE
from labkit.plan import Plan
from labkit.retry import BUSINESS
from labkit.seat import Seat
from labkit.trace import Event

_MAX_ERRORS = 20
_ENDS = ("started", "returned", "raised")               # a worker has no transaction open after these


class Chronicle:
    """`events` so far, the `account` of copies, and `misuse`: how the handler broke its channel, or ""."""

    def __init__(self, plan: Plan, on_excess: Callable[[str], None]):
        """on_excess(effect key) is called when a message is delivered, or published, more often than the plan allows."""
        self.events: list[Event] = []
        self.account = Account(plan.automatic, plan.dead_letter)
        self.misuse = ""
        self._plan, self._on_excess = plan, on_excess
        self._started_ns = time.monotonic_ns()
        self._errors: Counter[str] = Counter()
        self._handed: Counter[str] = Counter()        # message id -> handlers entered, whatever became of the ledger's log; or publishes

    def note(self, name: str, lane: str, detail: dict | None = None, **about: Any) -> None:
        """Writes an event that no worker could write itself."""
        self._take(Event(self.now_ms, lane, name, steps.NOTE, detail=detail or {}, **about))

    def blame(self, error: str) -> None:
        """Counts an error, told in the learner's terms."""
        self._errors[error] += 1

    def read(self, seats: Sequence[Seat]) -> None:
        """Takes what the workers' traces hold by now, all of them in the order of time."""
        records = [(record, seat) for seat in seats if seat.process for record in seat.process.trace.read()]
        if len(seats) > 1:
            records.sort(key=lambda pair: pair[0][0])
        for record, seat in records:
            self._learn(seat, *record)

    def count_charges(self, charges: list[tuple[int, str, str]] | None) -> dict[str, int] | None:
        """Returns effect key -> charges, of the provider's (time in ns, effect key, charge), and notes those that no worker heard of."""
        if charges is None:
            return None
        heard = {event.detail["outcome"] for event in self.events if (event.name, event.phase) == (steps.PROVIDER_CHARGE, steps.AFTER)}
        for ns, effect_key, charge in charges:
            if charge not in heard:
                self._take(Event(self._ms(ns), "provider", "charged", steps.NOTE, effect_key=effect_key))
        return dict(Counter(effect_key for _, effect_key, _ in charges))

    def in_transaction(self, lane: str) -> bool:
        """Tells whether a worker's last transaction is still open."""
        last = (event for event in reversed(self.events) if event.lane == lane and (event.turn or event.name in _ENDS))
        return next((event.turn for event in last), None) == steps.LEDGER_BEGIN

    @property
    def now_ms(self) -> float:
        """The time, in milliseconds since the run began."""
        return self._ms(time.monotonic_ns())

    @property
    def errors(self) -> list[str]:
        """The errors, the most frequent first, with how often they came."""
        return [text + (f" — {times} times" if times > 1 else "") for text, times in self._errors.most_common(_MAX_ERRORS)]

    def _learn(self, seat: Seat, ns: int, name: str, phase: str, number: int, detail: dict[str, Any]) -> None:
        if name == steps.RECEIVE:
            about = {field: detail[field] for field in ("message_id", "effect_key", "position", "tag")} | {"attempt": detail.get("outcome")}
            about["position"] = self._plan.known(about["position"])
            if about["effect_key"] == UNREADABLE and about["position"]:       # the lab knows what it published there
                about["effect_key"] = self._plan.messages[about["position"] - 1].effect_key
            seat.deliveries[number] = about
            detail = {field: value for field, value in detail.items() if field not in about and field != "outcome"}
            seat.running, seat.idle = True, False
            self._handed[about["message_id"]] += phase == steps.AFTER
            if (about["attempt"] or 0) > self._plan.max_deliveries:
                seat.running = False                  # the worker does not enter the handler again
            if max(about["attempt"] or 0, self._handed[about["message_id"]]) > self._plan.max_deliveries:
                self._on_excess(about["effect_key"])
        if number == 0 and name == steps.PUBLISH and phase == steps.AFTER:    # by a producer or a relay
            self._handed[detail["event_id"]] += 1
            if self._handed[detail["event_id"]] > self._plan.max_deliveries:
                self._on_excess(detail["effect_key"])
        about = seat.deliveries.get(number) or {"message_id": detail.get("event_id"), "effect_key": detail.get("effect_key")}
        self._take(Event(self._ms(ns), seat.lane, name, phase, **about, detail=detail))
        match name:
            case "returned":
                seat.running = False
            case "raised":
                seat.running = False
                place = origin.tell(detail["frames"], self._plan.files)
                if detail.get("kind") != BUSINESS:    # which is an answer, and no error
                    self.blame(detail["error"] + (f" ({place})" if place else ""))
            case "channel.closed" if "unknown delivery tag" in detail["text"] and not self.misuse:
                self.misuse = ("the handler answered a delivery that its channel did not know any more (a second answer, or a foreign tag), "
                               f"and the broker closed the channel: {detail['code']} {detail['text']}")

    def _take(self, event: Event) -> None:
        self.events.append(event)
        self.account.take(event)

    def _ms(self, ns: int) -> float:
        return (ns - self._started_ns) / 1e6
