"""The supervisor: carries one run out, from the first declaration to the moment when nothing more can happen.

It publishes, seats the workers, buries and replaces the dead, and decides by the account of copies when the run is
over: never by one look at a queue while somebody may still take from it. All of it on the controller thread.
"""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from typing import Any

from labkit.account import DEAD_LETTERED, REJECTED, VANISHED, WAITING
from labkit.amqp import Channel
from labkit.broker.address import Address
from labkit.chronicle import Chronicle
from labkit.crew import Crew
from labkit.errors import BrokerError, HandlerError, LabError
from labkit.firing import Firing
from labkit.plan import Plan
from labkit.prints import Prints
from labkit.publisher import Publisher
from labkit.relay import Relay
from labkit.result import Facts
from labkit.seat import Seat
from labkit.stepping import Stepping
from labkit.table import plain
from labkit.trace import Event

MAX_UNPLANNED_DEATHS = 5
_STALL_S = 0.3                                        # this long without news from idle workers, and copies are counted anew
_HUNG = "a worker hung with its delivery, and nothing else was left to do"
_ON_THE_WAY_S = 1                                     # for a message from its queue to the dead-letter queue
_FAREWELL_S = 2                                       # for workers to leave, and for a last answer of the broker


class Supervisor:
    """One run under way. `carry_out` returns its facts; `events` grows meanwhile."""

    def __init__(self, plan: Plan, crew: Crew, channel: Channel, address: Address, prefix: str, number: int, version: str):
        self._plan, self._crew, self._channel, self._address, self._version = plan, crew, channel, address, version
        self._publisher = Publisher(plan, channel, prefix, number, self._note, lambda error: self._fail(error, "a message could not be published"))
        self._chronicle = Chronicle(plan, self._exceed)
        self.events, self.account = self._chronicle.events, self._chronicle.account
        self.firing = Firing(plan.faults, self._note) if plan.order is None else Stepping(plan.order, plan.seed, plan.workers, self._note)
        self._prints = Prints()
        self._seats: list[Seat] = []
        self._via: Address | None = None       # the relay's address, where one is needed
        self._changed = asyncio.Event()
        self._recount = self._dismissing = False
        self._stuck_at = 0                     # the copy that nobody settled, where `_stuck` says so
        self._deaths = self._left = 0          # what the queue held when everybody had left
        self._ending = self._reason = self._stuck = ""
        self._failure: LabError | None = None

    async def carry_out(self) -> Facts:
        """Does the run. Raises BrokerError when it cannot begin, HandlerError when a worker cannot use the handler."""
        plan, beside = self._plan, None
        self._channel.on_end = self._lose_broker
        try:
            if self.firing.needs_relay:
                self.firing.relay = Relay(self._address.host, self._address.port)
                self._via = replace(self._address, **await self.firing.relay.start())
            await self._publisher.open()
            if plan.publish == "while":
                beside = asyncio.ensure_future(self._publisher.publish_beside())
                beside.add_done_callback(self._hear_publisher)
            try:
                async with asyncio.timeout(plan.deadline_s):
                    await self._work_it_off()
            except TimeoutError:
                self._end("deadline", f"the deadline of {plan.deadline_s:g} s passed" + await self._where_it_is())
            except BrokerError as error:
                self._lose_broker(error)
            where = await self._take_leave()
            if self._failure:
                raise self._failure
            return self._facts(where)
        finally:
            if beside:
                beside.cancel()
            self._dismissing = True
            for seat in self._seats:
                if seat.process:
                    seat.process.signal(signal.SIGKILL)
                    seat.process.discard()
            if self.firing.relay:
                await self.firing.relay.close()
            self._publisher.close()
            self._crew.refill()

    def look(self) -> tuple[list[Event], list[int], dict[int, str]]:
        """Returns what is known by now: events, how often each fault fired, and where each copy is."""
        self._read()
        return list(self.events), list(self.firing.fired), dict(self.account.where)

    def stop(self) -> None:
        """Ends the run at once, as a person asked."""
        self._end("stopped", "the run was stopped by hand")

    def kill(self, worker: int) -> None:
        """Kills a worker process, as a person asked."""
        for seat in self._seats:
            if seat.number == worker and seat.process:
                seat.by_hand = True
                seat.process.signal(signal.SIGKILL)

    # -- while they work

    async def _work_it_off(self) -> None:
        self._seats = [Seat(number) for number in range(1, self._plan.workers + 1)]
        while True:
            for seat in self._seats:
                self._seat(seat)
            await self._until_quiet()
            if self._ending or self._stuck:
                return
            await self._dismiss()
            self._left = await self._ready()
            if not self._left:
                return
            self._recount = False                     # something is left: an ack that never arrived, or a slow delivery

    def _seat(self, seat: Seat) -> None:
        process, plan = self._crew.take(self._via), self._plan
        seat.sit(process)
        process.on_frame = lambda frame: self._hear(seat, frame)
        process.on_print = self._prints.take
        process.on_end = lambda: seat.process is process and self._bury(seat)
        # With automatic acknowledgement the client's buffer is filled first, so that a kill loses the same number each time.
        fill = len(self.account.outstanding) if plan.automatic and plan.workers == 1 and self._publisher.done else 0
        process.give({"queue": self._publisher.work, "prefetch": plan.prefetch, "automatic": plan.automatic, "fill": fill,
                      "max_deliveries": plan.max_deliveries,
                      "armed": self.firing.armed, "ledger": plan.ledger.wire, "consumer": plan.consumer, "forget_after": plan.forget_after, "worker": seat.number, "folder": os.getcwd(), "path": sys.path}, plan.blob)
        if process.exit_status is not None:
            self._bury(seat)

    def _hear(self, seat: Seat, frame: dict[str, Any]) -> None:
        self._read()
        match frame["t"]:
            case "idle":
                seat.idle = frame["handled"] == len(seat.deliveries)          # else it was sent before a delivery that is known by now
                if seat.idle and seat.deliveries:
                    self.firing.finish(seat)
            case "free":
                seat.process.hear_free(frame["done"])
            case "gate":
                self.firing.ask(seat, frame)
            case "fenced":
                self.firing.fire(seat)
            case "unreachable":
                self._end("unreachable", f"the connection to the broker ended: worker {seat.number} cannot reach it any more: {frame['error']}")
            case "unusable":
                self._fail(HandlerError("A worker process could not load the handler.", frame["error"],
                                        "Import what it needs inside the handler, or keep helper files beside the notebook."), "the handler could not be loaded")
        self._changed.set()

    def _hear_publisher(self, beside: asyncio.Task) -> None:
        self._changed.set()
        if not beside.cancelled() and (error := beside.exception()):
            if not isinstance(error, BrokerError):
                raise error
            self._lose_broker(error)

    def _read(self) -> None:
        self._chronicle.read(self._seats)

    def _bury(self, seat: Seat) -> None:
        """Notes how a worker's process ended, and seats another while there is work."""
        self._read()
        seat.process.read_prints()
        seat.running = False
        self._changed.set()
        if self._dismissing:
            return
        status = seat.process.exit_status
        if status == -signal.SIGKILL and seat.by_hand:
            self._note("killed", seat.lane, {"by": "hand"})
        elif status != -signal.SIGKILL or not self.firing.prove_crash(seat):
            self._note("killed" if status == -signal.SIGKILL else "exited", seat.lane, {"status": status})
            self._chronicle.blame(f"worker {seat.number} ended by itself, " + (f"with status {status}" if status >= 0 else f"by signal {-status}"))
            self._deaths += 1
        seat.process.discard()
        seat.process = None
        if self._deaths > MAX_UNPLANNED_DEATHS:
            self._end("gave up", f"the worker processes ended by themselves {self._deaths} times, so the supervisor gave up")
        elif self._plan.workers == 1 and self._publisher.done and (self._plan.automatic or self.account.outstanding):
            self._recount = True                      # its successor finds the queue as it is when the broker has taken back what it held
        elif self.account.outstanding or not self._publisher.done:
            self._seat(seat)
        else:
            self.firing.finish(seat)

    def _lose_broker(self, error: BrokerError) -> None:
        self._end("unreachable", f"the connection to the broker ended: {error.why or error.what}")

    def _exceed(self, effect_key: str) -> None:
        self._end("max_deliveries", f"{plain(effect_key)} was delivered more than {self._plan.max_deliveries} times, so the run was stopped")

    def _fail(self, error: LabError, reason: str) -> None:
        self._failure = error
        self._end("stopped", reason)

    # -- the end

    async def _until_quiet(self) -> None:
        """Waits until nothing more can happen by itself, or until nothing has happened for a while."""
        while not self._quiet():
            hung = any(seat.hung == "for good" for seat in self._seats)
            all_idle = self._publisher.done and all(seat.hung == "for good" or (seat.idle and not seat.running) for seat in self._seats)
            try:
                await asyncio.wait_for(self._changed.wait(), _STALL_S if all_idle else None)
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
        everything = {position for tags in held for position in tags.values()} == outstanding
        full = not self._plan.automatic and all(len(tags) >= self._plan.prefetch for tags in held)
        if not everything and not full:
            return False
        unanswered = [position for seat, tags in zip(self._seats, held) if not seat.hung for position in tags.values()]
        if unanswered:
            self._stuck_at = unanswered[0]
            key = plain(self._plan.messages[unanswered[0] - 1].effect_key)
            self._stuck = f"the handler returned without an ack, nack or reject for {key}, so its delivery was never settled"
        else:
            self._end("stopped", _HUNG + self._locked())
        return True

    async def _dismiss(self) -> None:
        """Has every worker leave, kills those that do not, and reads their traces to the end."""
        self._dismissing = True
        may_stay = not (self._ending or self._stuck or self.account.outstanding or self._plan.automatic or self._via)
        present = [seat for seat in self._seats if seat.process and seat.process.exit_status is None]
        for seat in present:
            if seat.hung or seat.running:
                seat.process.signal(signal.SIGKILL)
            else:
                seat.process.tell({"t": "stop", "may_stay": may_stay})
        try:
            await self._until_gone(present)
        except TimeoutError:
            for seat in present:
                seat.process.signal(signal.SIGKILL)
            await self._until_gone(present)
        self._read()
        for seat in present:
            seat.process.read_prints()
            self.account.release(seat.lane)
            if seat.process.exit_status is None:
                self._crew.give_back(seat.process)
            else:
                seat.process.discard()
            seat.process = None
        self._dismissing = False

    async def _until_gone(self, seats: list[Seat]) -> None:
        async with asyncio.timeout(_FAREWELL_S):
            while any(seat.process.exit_status is None and not seat.process.free for seat in seats):
                self._changed.clear()
                await self._changed.wait()

    async def _ready(self) -> int:
        """Returns how many messages the work queue holds, now that nobody takes from it."""
        while True:
            ready, consumers = await self._channel.count(self._publisher.work)
            if not consumers:
                return ready

    async def _take_leave(self) -> dict[int, str] | None:
        """Returns where each copy is, or None when the broker cannot be asked."""
        try:
            async with asyncio.timeout(3 * _FAREWELL_S):
                await self._dismiss()
                if self._ending == "unreachable" or self._channel.blocked:
                    return None
                await self._find_the_rest()
        except (TimeoutError, BrokerError):
            self._end("unreachable", "the run came to its end")
            self._reason += ", and then the broker did not answer any more"
            return None
        return self.account.where

    async def _find_the_rest(self) -> None:
        """Compares the queue with the account; where they differ, looks at what the queue holds."""
        ready, outstanding = await self._ready(), set(self.account.outstanding)
        if ready != len(outstanding) or any(self.account.where[position] == REJECTED for position in outstanding):
            found = await self._channel.drain(self._publisher.work, ready)
            if self._plan.dead_letter and not self._plan.automatic:
                await self._hear_dead_letters({position for position in outstanding - found
                                               if self._plan.delivery_limit or self.account.where[position] == REJECTED})
            for position in outstanding - found:
                self.account.move(position, VANISHED)
            if self._stuck and self._stuck_at not in found and self._plan.delivery_limit is None:      # settled, only not through labkit
                self._stuck = ""
                self._end("stopped", "the handler answered a delivery through pika's channel, which the lab cannot follow; answer with delivery.ack() or its like")
            for position in found:
                self.account.move(position, WAITING)

    async def _hear_dead_letters(self, positions: set[int]) -> None:
        """Waits a while for the dead letters of these copies: on its way between two queues, a message is in neither."""
        try:
            async with asyncio.timeout(_ON_THE_WAY_S):
                while any(self.account.where[position] != DEAD_LETTERED for position in positions):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    async def _where_it_is(self) -> str:
        """Returns, in words, what the run was waiting for: a broker that takes no messages, or the line of a handler."""
        if self._channel.blocked and not self._publisher.done:
            return f" while RabbitMQ took no messages: {self._channel.blocked}"
        self._read()
        if told := self._locked():
            return told
        for seat in self._seats:
            if seat.at_work and (told := await self._prints.where(seat.process, self._plan.files)):
                return f" while the handler was still running, {told}"
        return ""

    def _locked(self) -> str:
        """Returns, in words, which frozen worker keeps the others from the ledger."""
        return next((f" while {seat.lane}, frozen inside a transaction, held the ledger's lock" for seat in self._seats
                     if seat.hung and self._chronicle.in_transaction(seat.lane)), "")

    def _end(self, ending: str, reason: str) -> None:
        if not self._ending:
            self._ending, self._reason = ending, reason
        self._changed.set()

    def _note(self, name: str, lane: str, detail: dict | None = None, **about: Any) -> None:
        self._chronicle.note(name, lane, detail, **about)
        self._changed.set()

    def _facts(self, where: dict[int, str] | None) -> Facts:
        self.events.sort(key=lambda event: event.at_ms)
        return Facts({**self._plan.settings(), "broker": self._version}, [str(fault) for fault in self._plan.faults], self.firing.fired,
                     effects=None, where=where, ending=self._ending or "over", reason=self._reason, printed=self._prints.text,
                     printed_bytes=self._prints.total_bytes, errors=self._chronicle.errors, misuse=self._chronicle.misuse, stuck=self._stuck, choices=self.firing.choices)
