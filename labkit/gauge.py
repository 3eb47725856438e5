"""The gauge: what waits, what is in a handler, and how old the oldest message is, told by the events of a run as they come.

The picture of a run, its measures and the samples of a run under way all read the same gauge.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit import steps
from labkit.account import Account
from labkit.table import count
from labkit.trace import Event

#: what happens to a worker or to its connection, and is marked on the axis of time
FAULTS = ("killed", "exited", "stopped", "ack.dropped")
_ENDS = ("returned", "raised")
_READ = {*FAULTS, *_ENDS, "started", "published", "dead-lettered", "channel.closed", "cancelled", "connection.lost", steps.RECEIVE, steps.RETRY_PUBLISH, *steps.ANSWERS}


@dataclass(frozen=True)
class Measures:
    """What to watch of a run, beside the mean that looks healthy while a few messages hold the worker.

    mean_handling_ms: from the receive to the return of a handler, or to its error; over all deliveries that ended
    retries:          as in `counts`
    oldest_ms:        the largest age, since its confirm, that a message had before it was settled
    terminal_share:   terminal keys, of all keys that have an outcome; between 0 and 1
    """

    mean_handling_ms: float
    retries: int
    oldest_ms: float
    terminal_share: float

    def __repr__(self) -> str:
        return (f"mean handling {self.mean_handling_ms:.1f} ms · {count(self.retries, 'retry')} · oldest {self.oldest_ms:,.0f} ms · "
                f"{self.terminal_share:.0%} terminal")


class Gauge:
    """`arrivals`, `services` and `deliveries` so far: messages confirmed, messages settled, handlers entered."""

    def __init__(self, settings: Mapping[str, Any], account: Account | None = None):
        """settings: of the run, as in `Facts`; account: one that somebody else keeps, and that knows all events which the gauge is given."""
        self._automatic, self._keeps = settings.get("acknowledge") == "auto", account is None
        self._account = account or Account(self._automatic, settings.get("dead_letter", True))
        self.arrivals = self.deliveries = self.dead_lettered = self.handled = 0
        self.handling_ms = self.oldest_ms = 0.0       # of all handled; and the largest age so far, where the gauge keeps its account
        self._confirmed_ms: dict[int, float] = {}
        self._waiting: list[int] = []                 # a heap of those that may not be settled
        self._began_ms: dict[str, float] = {}         # lane -> when its handler was given what it has

    def take(self, event: Event) -> bool:
        """Learns from one event; tells whether it may have changed anything."""
        name = event.name
        if name not in _READ or name in steps.ANSWERS and (event.phase != steps.AFTER or not self._keeps):
            return False
        if self._keeps:
            self.oldest_ms = max(self.oldest_ms, self.age_ms(event.at_ms))
            self._account.take(event)
        if name == steps.RECEIVE:
            if event.phase == steps.BEFORE:
                self._began_ms[event.lane] = event.at_ms
                self._arrive(event)                   # its confirm may be heard of later
            self.deliveries += event.phase == steps.AFTER
        elif name in _ENDS:
            if (began := self._began_ms.pop(event.lane, None)) is not None:
                self.handled += 1
                self.handling_ms += event.at_ms - began
        elif name == "started":                       # what its predecessor was at work on ended without a word
            self._began_ms.pop(event.lane, None)
        elif name == "published":
            self._arrive(event)
        self.dead_lettered += name == "dead-lettered"
        return True

    @property
    def outstanding(self) -> int:
        """Messages that are confirmed and not settled."""
        return len(self._account.open)

    @property
    def services(self) -> int:
        """Messages that are settled."""
        return self.arrivals - self.outstanding

    @property
    def in_flight(self) -> int:
        """Messages that are in a handler."""
        return 0 if self._automatic else min(self.outstanding, sum(map(len, self._account.held.values())))

    @property
    def waiting(self) -> int:
        """Messages that wait: in the queue, for their retry, or with a worker that has not begun with them."""
        return self.outstanding - self.in_flight

    @property
    def mean_handling_ms(self) -> float:
        """The mean over all handlers that ended."""
        return self.handling_ms / self.handled if self.handled else 0.0

    def age_ms(self, now_ms: float) -> float:
        """Returns the age of the oldest message that is not settled."""
        while self._waiting and self._waiting[0] not in self._account.open:
            heapq.heappop(self._waiting)
        return now_ms - self._confirmed_ms[self._waiting[0]] if self._waiting else 0.0

    def _arrive(self, event: Event) -> None:
        if event.position is not None and event.position not in self._confirmed_ms:
            self.arrivals += 1
            self._confirmed_ms[event.position] = event.at_ms
            heapq.heappush(self._waiting, event.position)


def measure(run: "Run") -> Measures:
    """Returns the measures of a run."""
    gauge = Gauge(run.facts.settings)
    for event in run.events:
        gauge.take(event)
    oldest_ms = max(gauge.oldest_ms, gauge.age_ms(run.events[-1].at_ms)) if run.events else 0.0
    counts = run.counts
    ended = counts["keys"] - counts["pending"] - counts["unknown"]
    return Measures(gauge.mean_handling_ms, counts["retries"], oldest_ms, counts["terminal"] / ended if ended else 0.0)
