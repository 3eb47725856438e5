"""Sampling a run under way, on the controller thread: what its events tell by now, and what the broker says of its queue.

The broker is asked on a channel of its own, and never twice at once: while an answer is missing the samples go on without it.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.errors import BrokerError
from labkit.gauge import FAULTS, Gauge
from labkit.live import Live

_RATE_MS = 1000                                       # the rates are those of the last second
_PATIENCE_S = 0.5                                     # for the broker's answer: on a busy machine a late sample, rather than one without


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a run.

    at_ms:       milliseconds since the run began
    ready:       messages in the work queue, as the broker says, or the events where the run has closed it; None where there was no answer in time
    waiting:     messages that no handler has begun with, as the events say: ready, prefetched, or delayed for a retry
    in_flight:   messages in a handler
    oldest_ms:   age of the oldest message that is not settled
    arrivals, services, deliveries, dead_lettered: so far: confirmed, settled, handed to a handler, dead-lettered
    arrivals_per_s, services_per_s, deliveries_per_s: over the last second, or since the first sample
    mean_handling_ms: of the handlers that have ended so far
    """

    at_ms: float
    ready: int | None
    waiting: int
    in_flight: int
    oldest_ms: float
    arrivals: int
    services: int
    deliveries: int
    dead_lettered: int
    arrivals_per_s: float
    services_per_s: float
    deliveries_per_s: float
    mean_handling_ms: float


async def sampling(live: Live, every_s: float, for_s: float | None, tell: Callable[[Any], None]) -> None:
    """Tells of the run until it is over or for_s passed, and then None: (sample, faults since the one before, when the first message was confirmed, over, last)."""
    depth, taken = _Depth(), None
    clock = asyncio.get_running_loop().time
    begun, ticks, over = clock(), 0, False
    end = begun + for_s if for_s else float("inf")
    try:
        while True:
            ready = await depth.ask(live)
            over = live.done
            last = over or clock() >= end
            if supervisor := live.supervisor:
                taken = taken or _Taken(Gauge(live.plan.settings(), supervisor.account), supervisor)
                if (began_ms := taken.began_ms()) is not None:
                    tell((*taken.sample(ready), began_ms, over, last))
            if last:
                return
            ticks = max(ticks + 1, int((clock() - begun) / every_s))
            await live.over(min(begun + ticks * every_s, end) - clock())
    finally:
        depth.close()
        tell(None)


class _Taken:
    """What is known of one run by its events, of which each is read once."""

    def __init__(self, gauge: Gauge, supervisor: Any):
        self._gauge, self._supervisor, self._read = gauge, supervisor, 0
        self._earlier: list[Sample] = []              # as far as the rates go back
        self._began_ms: float | None = None

    def began_ms(self) -> float | None:
        """Returns when the first message was confirmed, or None before that: there is nothing to be seen."""
        if self._began_ms is None:
            self._began_ms = next((event.at_ms for event in self._supervisor.events if event.name == "published"), None)
        return self._began_ms

    def sample(self, ready: int | None) -> tuple[Sample, list[tuple[float, str]]]:
        """Returns a sample, and the faults since the one before."""
        gauge, faults, now_ms = self._gauge, [], self._supervisor.catch_up()
        for event in itertools.islice(self._supervisor.events, self._read, None):
            gauge.take(event)
            if event.name in FAULTS:
                faults.append((event.at_ms, event.name))
        self._read = len(self._supervisor.events)
        totals = gauge.arrivals, gauge.services, gauge.deliveries
        while len(self._earlier) > 1 and now_ms - self._earlier[1].at_ms >= _RATE_MS:
            del self._earlier[0]
        if self._supervisor.queue is None:            # not there yet, or not any more
            ready = gauge.waiting
        sample = Sample(now_ms, ready, gauge.waiting, gauge.in_flight, gauge.age_ms(now_ms), *totals, gauge.dead_lettered,
                        *self._rates(now_ms, totals), gauge.mean_handling_ms)
        self._earlier.append(sample)
        return sample, faults

    def _rates(self, now_ms: float, totals: tuple[int, ...]) -> list[float]:
        if not self._earlier:
            return [0.0] * len(totals)
        first = self._earlier[0]
        return [1000 * (now - before) / max(now_ms - first.at_ms, 1) for now, before in zip(totals, (first.arrivals, first.services, first.deliveries))]


class _Depth:
    """How long the work queue is, asked of the broker."""

    def __init__(self):
        self._channel, self._answer = None, None

    async def ask(self, live: Live) -> int | None:
        """Returns the number of ready messages, or None where it is not to be had in time."""
        supervisor = live.supervisor
        if supervisor is None or (queue := supervisor.queue) is None:
            return None
        if self._answer is None:
            self._answer = asyncio.ensure_future(self._count(supervisor, queue))
        await asyncio.wait({self._answer}, timeout=_PATIENCE_S)
        if not self._answer.done():
            return None                               # frozen, or busy: it is not asked again before it answered
        try:
            ready = self._answer.result()
        except BrokerError:                           # the run has ended, and its queue is gone; or the connection is
            return None
        self._answer = None
        return ready

    def close(self) -> None:
        """Gives the channel back."""
        if self._answer:
            self._answer.cancel()
            self._answer.add_done_callback(lambda answer: self._give_back(answer.cancelled() or answer.exception()))
        else:
            self._give_back()

    async def _count(self, supervisor: Any, queue: str) -> int:
        self._channel = self._channel or await supervisor.open_channel()
        ready, _ = await self._channel.count(queue)
        return ready

    def _give_back(self, _: Any = None) -> None:
        if self._channel:
            self._channel.give_back()
