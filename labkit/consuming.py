"""A run that consumes: messages are published, workers handle them, until no copy of any is on its way.

It decides by the account of copies when the run is over: never by one look at a queue while somebody may still take from it.
"""

import asyncio
import functools
from typing import Any

from labkit import steps, topology
from labkit.account import DEAD_LETTERED, REJECTED, VANISHED, WAITING, Copy
from labkit.errors import BrokerError
from labkit.plan import Plan
from labkit.publisher import Publisher
from labkit.seat import Seat
from labkit.supervisor import Supervisor
from labkit.table import plain

_STALL_S = 0.3                                        # this long without news from idle workers, and copies are counted anew
_HUNG = "a worker hung with its delivery, and nothing else was left to do"
_ON_THE_WAY_S = 1                                     # for a message from its queue to the dead-letter queue, or back from that of its delay


class Consuming(Supervisor):
    """The supervisor of `Lab.run`."""

    def __init__(self, plan: Plan, crew: Any, channel: Any, address: Any, prefix: str, number: int, version: str):
        super().__init__(plan, crew, channel, address, prefix, number, version)
        self._publisher = Publisher(plan, channel, prefix, number, self._note, lambda error: self._fail(error, "a message could not be published"))
        self._beside: asyncio.Task | None = None
        self._name_of_delay = functools.partial(topology.delay_queue, prefix, number)
        self._delay_queues: dict[str, asyncio.Task] = {}                      # name -> its declaration
        self._recount = False
        self._stuck_at: Copy | None = None            # the copy that nobody settled, where `_stuck` says so
        self._dismissed_ms = 0.0                      # when everybody was told to leave, the last time
        self._left = 0                                # what the queue held when everybody had left

    async def _open(self) -> None:
        await self._publisher.open()
        self.queue = self._publisher.work
        if self._plan.publish == "while":
            self._beside = asyncio.ensure_future(self._publisher.publish_beside())
            self._beside.add_done_callback(self._hear_publisher)

    def _close(self) -> None:
        self.queue = None
        if self._beside:
            self._beside.cancel()
        for declared in self._delay_queues.values():
            declared.cancel()
        self._publisher.close(*[self._publisher.events] * self._passed_on(), *self._delay_queues)

    def _job(self, seat: Seat) -> tuple[dict[str, Any], bytes]:
        plan = self._plan
        # With automatic acknowledgement the client's buffer is filled first, so that a kill loses the same number each time.
        fill = len(self.account.outstanding) if plan.automatic and plan.workers == 1 and self._publisher.done else 0
        return {"queue": self._publisher.work, "events": self._publisher.events, "declared": topology.events_arguments(),
                "prefetch": plan.prefetch, "automatic": plan.automatic, "fill": fill, "max_deliveries": plan.max_deliveries, "forget_after": plan.forget_after}, plan.blob

    async def _work_it_off(self) -> None:
        self._seats = [Seat(number) for number in range(1, self._plan.workers + 1)]
        while True:
            for seat in self._seats:
                self._seat(seat)
            await self._until_quiet()
            if self._ending or self._stuck:
                return
            await self._dismiss()
            self._left = await self._ready()          # which may put off what is delayed
            if not self._left and not self._delayed():
                return
            self._recount = False                     # something is left: an ack that never arrived, a slow delivery, or one that comes later

    def _replace(self, seat: Seat) -> None:
        if self._plan.workers == 1 and self._publisher.done and (self._plan.automatic or self.account.outstanding):
            self._recount = True                      # its successor finds the queue as it is when the broker has taken back what it held
        elif self.account.outstanding or not self._publisher.done:
            self._seat(seat)
        else:
            self.firing.finish(seat)

    def _blocked(self) -> str | None:
        return None if self._publisher.done else self._channel.blocked

    async def _find_the_rest(self) -> dict[int, list[str]]:
        """Compares the queue with the account; where they differ, looks at what the queue holds."""
        self.queue = None                             # from here on it is looked into, and so emptied
        ready, outstanding = await self._ready(), set(self.account.outstanding)
        delayed = self._delayed()
        if ready != len(outstanding - delayed) or any(self.account.where[copy] == REJECTED for copy in outstanding):
            found = {(position, copy) for position, copy in await self._channel.drain(self._publisher.work, ready) if self._plan.known(position)}
            if self._plan.dead_letter and not self._plan.automatic:
                await self._hear_dead_letters({copy for copy in outstanding - found - delayed if self._plan.delivery_limit or self.account.where[copy] == REJECTED})
            for copy in outstanding - found - delayed:
                self.account.move(copy, VANISHED)
            if self._stuck and self._stuck_at not in found and self._plan.delivery_limit is None:      # settled, only not through labkit
                self._stuck = ""
                self._end("stopped", "the handler answered a delivery through pika's channel, which the lab cannot follow; answer with delivery.ack() or its like")
            for copy in found:
                self.account.move(copy, WAITING)
        if self._passed_on():
            await self._take_events(self._publisher.events)
        return self.account.places

    async def _dismiss(self) -> None:
        self._dismissed_ms = self._chronicle.now_ms
        await super()._dismiss()

    def _delayed(self) -> set[Copy]:
        """Returns the copies that are in the queue of their delay, or on their way back; not those that should have come long ago."""
        since_ms = self._chronicle.now_ms - 1000 * _ON_THE_WAY_S
        return {copy for copy, due_ms in self.account.due_ms.items() if due_ms > since_ms}

    def _patience_s(self) -> float:
        """Returns how long idle workers wait for news: until the last copy that is delayed must have come back."""
        last_ms = max((self.account.due_ms[copy] for copy in self._delayed()), default=0)
        return max(_STALL_S, (last_ms - self._chronicle.now_ms) / 1000 + _ON_THE_WAY_S if last_ms else 0)

    def _passed_on(self) -> bool:
        """Tells whether a handler has published something."""
        return any(event.name == steps.PUBLISH for event in self.events)

    def _hear(self, seat: Seat, frame: dict[str, Any]) -> None:
        if frame["t"] == "delay":
            self._provide(seat.process, frame["delay_ms"])
        else:
            super()._hear(seat, frame)

    def _provide(self, process: Any, delay_ms: int) -> None:
        """Declares the queue of a delay, once for all workers, and tells who asked when it is there.

        By one connection, because a quorum queue that two declare at once may be there and never hand its expired messages on (seen on 3.10.8).
        """
        queue = self._name_of_delay(delay_ms)
        if queue not in self._delay_queues:
            arguments = topology.delay_arguments(self._publisher.work, delay_ms)
            self._delay_queues[queue] = asyncio.ensure_future(self._channel.declare({queue: arguments}))

        def there(declared: asyncio.Task) -> None:
            if not declared.cancelled() and not declared.exception():         # else the broker is lost, which ends the run
                process.tell({"t": "answer", "queue": queue})
        self._delay_queues[queue].add_done_callback(there)

    def _hear_publisher(self, beside: asyncio.Task) -> None:
        self._changed.set()
        if not beside.cancelled() and (error := beside.exception()):
            if not isinstance(error, BrokerError):
                raise error
            self._lose_broker(error)

    async def _until_quiet(self) -> None:
        """Waits until nothing more can happen by itself, or until nothing has happened for a while."""
        while not self._quiet():
            hung = any(seat.hung == "for good" for seat in self._seats)
            all_idle = self._publisher.done and all(seat.hung == "for good" or (seat.idle and not seat.running) for seat in self._seats)
            try:
                await asyncio.wait_for(self._changed.wait(), self._patience_s() if all_idle else None)
            except TimeoutError:
                known = len(self.events)
                self._read()                          # a worker that was idle may be at work again, without a word
                if len(self.events) == known:
                    if hung:
                        self._end("stopped", _HUNG + self._locked())   # with deliveries in its buffer, which no trace tells
                    return
            self._changed.clear()

    def _quiet(self) -> bool:
        self._read()                                  # a dead letter may arrive before the worker says anything
        if self._ending or self._recount:
            return True
        if not self._publisher.done or any(seat.at_work for seat in self._seats):
            return False
        outstanding, held = self.account.outstanding, [self.account.held[seat.lane] for seat in self._seats]
        if not outstanding:                           # a message that nobody knows of is waited for, and an answer that follows an error
            return all(seat.idle or seat.hung or not seat.process for seat in self._seats if seat.deliveries) and (
                not self._left or any(seat.deliveries for seat in self._seats))
        if not all(seat.hung == "for good" or (seat.idle and not seat.hung) for seat in self._seats):
            return False
        everything = {copy for tags in held for copy in tags.values()} == outstanding
        full = not self._plan.automatic and all(len(tags) >= self._plan.prefetch for tags in held)
        if not everything and not full:
            return False
        unanswered = [copy for seat, tags in zip(self._seats, held) if not seat.hung for copy in tags.values()]
        if unanswered:
            self._stuck_at = unanswered[0]
            key = plain(self._plan.messages[self._stuck_at[0] - 1].effect_key)
            self._stuck = f"the handler returned without an ack, nack or reject for {key}, so its delivery was never settled"
        else:
            self._end("stopped", _HUNG + self._locked())
        return True

    async def _ready(self) -> int:
        """Returns how many messages the work queue holds, now that nobody takes from it."""
        while True:
            ready, consumers = await self._channel.count(self._publisher.work)
            if not consumers:
                break
        now_ms = self._chronicle.now_ms
        if now_ms - self._dismissed_ms > 1000 * _STALL_S:                     # a broker that stood still meanwhile has let nothing expire
            self.account.put_off(now_ms)
        return ready

    async def _hear_dead_letters(self, copies: set[Copy]) -> None:
        """Waits a while for the dead letters of these copies: on its way between two queues, a message is in neither."""
        try:
            async with asyncio.timeout(_ON_THE_WAY_S):
                while any(self.account.where[copy] != DEAD_LETTERED for copy in copies):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
