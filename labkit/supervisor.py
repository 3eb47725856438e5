"""The supervisor: carries one run out, from the first declaration to the moment when nothing more can happen.

It seats the workers, fires the planned faults, buries and replaces the dead, and decides by the account of copies when
the run is over. All of it on the controller thread.
"""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import cloudpickle

from labkit import origin, steps, topology
from labkit.account import HELD, REJECTED, VANISHED, WAITING, Account
from labkit.amqp import Channel
from labkit.crew import Crew, WorkerProcess
from labkit.errors import BrokerError, HandlerError, PlanError
from labkit.faults import Fault
from labkit.message import Message
from labkit.relay import Relay
from labkit.result import Facts
from labkit.trace import Event

MAX_UNPLANNED_DEATHS = 5
_STALL_S = 0.3                                        # this long without news from idle workers, and copies are counted anew
_FAREWELL_S = 2                                       # for workers to leave, and for a last answer of the broker
_PRINTED_BYTES = 20_000
_MAX_ERRORS = 20
_CONSUMER = "workbook"


@dataclass(frozen=True)
class Plan:
    """What is to be run; the arguments of `Lab.run`, checked."""

    handler: bytes
    files: dict[str, str]
    messages: list[Message]
    faults: tuple[Fault, ...]
    workers: int
    prefetch: int
    automatic: bool
    queue_type: str
    dead_letter: bool
    delivery_limit: int | None
    max_deliveries: int
    beside: bool
    rate: float | None
    deadline_s: float
    ledger: str
    settings: dict[str, Any]


class Seat:
    """One worker's place, taken by one process after another."""

    def __init__(self, number: int):
        self.number, self.lane = number, f"worker {number}"
        self.process: WorkerProcess | None = None
        self.idle = self.running = self.hung = self.by_hand = False
        self.deliveries: dict[int, dict[str, Any]] = {}
        self.firing: int | None = None                # the planned fault that waits for the worker's round trip
        self.asked: dict[str, Any] = {}


class Supervisor:
    """One run under way. `carry_out` returns its facts; `events` grows meanwhile."""

    def __init__(self, plan: Plan, crew: Crew, channel: Channel, address: dict[str, Any], prefix: str, number: int):
        self.plan, self._crew, self._channel, self._address = plan, crew, channel, address
        self._work, self._dead = topology.work_queue(prefix, number), topology.dead_queue(prefix, number)
        self.account = Account(plan.automatic, plan.dead_letter)
        self.events: list[Event] = []
        self.seats: list[Seat] = []
        self.fired = [0] * len(plan.faults)
        self._reserved = [0] * len(plan.faults)
        self._passed: Counter = Counter()
        self._changed = asyncio.Event()
        self._started_ns = time.monotonic_ns()
        self._ending, self._reason, self._stuck, self._misuse = "", "", "", ""
        self._errors: Counter[str] = Counter()
        self._printed, self._printed_bytes = bytearray(), 0
        self._dump: bytearray | None = None           # what a worker tells about its frames, while it was asked to
        self._deaths = 0
        self._published = self._recount = self._dismissed = False
        self._relay: Relay | None = None
        self._failure: Exception | None = None

    async def carry_out(self) -> Facts:
        """Does the run. Raises BrokerError when it cannot begin, HandlerError when a worker cannot use the handler."""
        plan = self.plan
        publisher = None
        try:
            await self._within(plan.deadline_s + len(plan.messages) / 500, self._prepare())
            if plan.beside:
                publisher = asyncio.ensure_future(self._publish_beside())
            try:
                async with asyncio.timeout(plan.deadline_s):
                    await self._work_it_off()
            except TimeoutError:
                self._end("deadline", f"the deadline of {plan.deadline_s:g} s passed" + await self._where_they_are())
            except BrokerError as error:
                self._end("unreachable", f"the broker could not be asked: {error.why or error.what}")
            where = await self._take_leave()
            if self._failure:
                raise self._failure
            return self._facts(where)
        finally:
            if publisher:
                publisher.cancel()
            self._dismissed = True
            for seat in self.seats:
                if seat.process:
                    seat.process.signal(signal.SIGKILL)
                    seat.process.discard()
            if self._relay:
                await self._relay.close()
            self._channel.give_back(self._work, *[self._dead] * self.plan.dead_letter)
            self._crew.refill()

    def stop(self) -> None:
        """Ends the run at once, as a person asked."""
        self._end("stopped", "the run was stopped by hand")

    def kill(self, number: int) -> None:
        """Kills a worker process, as a person asked."""
        seat = self.seats[number - 1]
        if seat.process:
            seat.by_hand = True
            seat.process.signal(signal.SIGKILL)

    # -- before the workers

    async def _prepare(self) -> None:
        plan = self.plan
        self._channel.on_end = self._lose_broker
        if plan.dead_letter:
            self._channel.declare(self._dead, topology.dead_arguments())
        self._channel.declare(self._work, topology.work_arguments(plan.queue_type, plan.dead_letter and self._dead, plan.delivery_limit))
        if plan.dead_letter:
            self._channel.consume(self._dead, self._take_dead_letter)
        if any(fault.kind == "lose" for fault in plan.faults):
            self._relay = Relay(self._address["host"], self._address["port"])
            self._via = await self._relay.start()
        if not plan.beside:
            await self._channel.publish(self._work, list(enumerate(plan.messages, 1)), self._note_outcome)
            self._published = True

    async def _within(self, seconds: float, work) -> None:
        try:
            async with asyncio.timeout(seconds):
                await work
        except TimeoutError:
            blocked = self._channel.blocked
            raise BrokerError(f"RabbitMQ did not take the messages within {seconds:.0f} s.",
                              f"it has blocked publishers: {blocked}" if blocked else "it is frozen, or overloaded",
                              "Free memory or disk space, or run `python3 -m labkit doctor`.") from None

    async def _publish_beside(self) -> None:
        begun, loop = time.monotonic(), asyncio.get_running_loop()
        for position, message in enumerate(self.plan.messages, 1):
            if self.plan.rate:
                await asyncio.sleep(begun + (position - 1) / self.plan.rate - time.monotonic())
            await self._channel.publish(self._work, [(position, message)], self._note_outcome)
        self._published = True
        loop.call_soon(self._changed.set)

    def _note_outcome(self, position: int, outcome: str) -> None:
        if outcome == "confirmed":
            message = self.plan.messages[position - 1]
            self._note("published", "broker", position=position, message_id=message.message_id, effect_key=message.effect_key)
        else:
            self._failure = BrokerError(f"RabbitMQ {outcome} message {position}.", "the run's queue is gone, or full",
                                        "Run the cell again; if it stays, run `python3 -m labkit doctor`.")

    def _take_dead_letter(self, message_id: str, position: int, headers: dict) -> None:
        message = self.plan.messages[position - 1]
        reason = next((death["reason"] for death in headers.get("x-death", ()) if death["queue"] == self._work), "unknown")
        self._note("dead-lettered", "broker", position=position, message_id=message_id, effect_key=message.effect_key, detail={"reason": reason})
        self._changed.set()

    def _lose_broker(self, error: BrokerError) -> None:
        self._end("unreachable", f"the connection to the broker ended: {error.why}")

    # -- the workers

    async def _work_it_off(self) -> None:
        self.seats = [Seat(number) for number in range(1, self.plan.workers + 1)]
        while not self._ending:
            for seat in self.seats:
                self._seat(seat)
            await self._until_quiet()
            if self._ending or self._stuck:
                return
            await self._dismiss()
            if not await self._ready():
                return
            self._recount = False                     # something is left: an ack that never arrived, or a slow delivery

    def _seat(self, seat: Seat) -> None:
        process = self._crew.take(self._via if self._relay else None)
        seat.process, seat.deliveries = process, {}
        seat.idle = seat.running = seat.hung = seat.by_hand = False
        seat.firing = None
        process.on_frame = lambda frame: self._hear(seat, frame)
        process.on_print = self._take_print
        process.on_end = lambda: seat.process is process and self._bury(seat)
        armed = sorted({(fault.step, fault.phase) for fault in self.plan.faults})
        alone = self.plan.automatic and len(self.seats) == 1 and self._published
        process.tell({"t": "job", "queue": self._work, "prefetch": self.plan.prefetch, "automatic": self.plan.automatic, "armed": armed,
                      "fill": len(self.account.outstanding) if alone else 0, "ledger": self.plan.ledger, "consumer": _CONSUMER,
                      "busy_ms": 5000, "worker": seat.number, "folder": os.getcwd(), "path": sys.path}, self.plan.handler)
        if process.exit_status is not None:
            process.on_end()

    def _hear(self, seat: Seat, frame: dict[str, Any]) -> None:
        self._read()
        match frame["t"]:
            case "idle":
                seat.idle = frame["handled"] == len(seat.deliveries)      # else it was sent before a delivery that is known by now
            case "gate":
                self._at_gate(seat, frame)
            case "fenced":
                self._fire(seat)
            case "unreachable":
                self._end("unreachable", f"worker {seat.number} could not reach the broker: {frame['error']}")
            case "unusable":
                self._failure = HandlerError("A worker process could not load the handler.", frame["error"],
                                             "Import what it needs inside the handler, or keep helper files beside the notebook.")
                self._end("stopped", "the handler could not be loaded")
        self._changed.set()

    def _read(self) -> None:
        """Takes what the workers' traces hold by now, all of them in the order of time."""
        records = [(record, seat) for seat in self.seats if seat.process for record in seat.process.trace.read()]
        if len(self.seats) > 1:
            records.sort(key=lambda pair: pair[0][0])
        for (ns, name, phase, number, detail), seat in records:
            self._learn(seat, ns, name, phase, number, detail)
        if self.account.most > self.plan.max_deliveries:
            position = max(self.account.deliveries, key=self.account.deliveries.get)
            key = self.plan.messages[position - 1].effect_key
            self._end("max_deliveries", f"{key} was delivered more than {self.plan.max_deliveries} times, so the run was stopped")

    def _learn(self, seat: Seat, ns: int, name: str, phase: str, number: int, detail: dict[str, Any]) -> None:
        if name == steps.RECEIVE:
            about = {field: detail.pop(field) for field in ("message_id", "effect_key", "position", "tag")}
            about["attempt"] = detail.pop("outcome", None)
            seat.deliveries[number] = about
            seat.running, seat.idle = True, False
        event = Event((ns - self._started_ns) / 1e6, seat.lane, name, phase, **seat.deliveries.get(number, {}), detail=detail)
        self.events.append(event)
        self.account.take(event)
        match name:
            case "returned":
                seat.running = False
            case "raised":
                seat.running = False
                place = origin.tell(detail["frames"], self.plan.files)
                self._errors[detail["error"] + (f" ({place})" if place else "")] += 1
            case "channel.closed" if "unknown delivery tag" in detail["text"] and not self._misuse:
                self._misuse = ("the handler answered a delivery that its channel did not know any more (a second answer, or a foreign tag), "
                                f"and the broker closed the channel: {detail['code']} {detail['text']}")

    def _bury(self, seat: Seat) -> None:
        self._read()
        status, seat.running = seat.process.exit_status, False
        if self._dismissed:
            self._changed.set()
            return
        planned = self.plan.faults[seat.firing] if seat.firing is not None else None
        name = "killed" if status == -signal.SIGKILL else "exited"
        if name == "killed" and planned and planned.kind == "crash":
            self.fired[seat.firing] += 1
            self._note(name, seat.lane, detail={"by": str(planned)}, **_about(seat.asked))
        else:
            self._note(name, seat.lane, detail={"by": "hand"} if seat.by_hand else {"status": status})
            if not seat.by_hand:
                self._deaths += 1
                self._errors[f"worker {seat.number} ended by itself, " + (f"with status {status}" if status >= 0 else f"by signal {-status}")] += 1
        seat.process.discard()
        seat.process = None
        if self._deaths > MAX_UNPLANNED_DEATHS:
            self._end("gave up", f"the worker processes ended by themselves {self._deaths} times, so the supervisor gave up")
        elif self.plan.automatic and len(self.seats) == 1:
            self._recount = True
        elif self.account.outstanding or not self._published:
            self._seat(seat)
        self._changed.set()

    # -- the planned faults

    def _at_gate(self, seat: Seat, asked: dict[str, Any]) -> None:
        seat.asked = asked = {**asked, "worker": seat.number}
        for index, fault in enumerate(self.plan.faults):
            if self._reserved[index] < fault.times and fault.concerns(asked):
                self._passed[index, asked["message_id"]] += 1
                if self._passed[index, asked["message_id"]] >= fault.nth:
                    self._reserved[index] += 1
                    seat.firing = index
                    if fault.kind == "fail":
                        self._fire(seat)
                    else:
                        seat.process.tell({"t": "answer", "do": "fence"})
                    return
        seat.process.tell({"t": "answer", "do": "go"})

    def _fire(self, seat: Seat) -> None:
        fault, process = self.plan.faults[seat.firing], seat.process
        match fault.kind:
            case "crash":
                process.signal(signal.SIGKILL)        # counted when the exit status proves it
                return
            case "hang":
                process.signal(signal.SIGSTOP)
                self._note("stopped", seat.lane, detail={"by": str(fault)}, **_about(seat.asked))
                process.tell({"t": "answer", "do": "go"})
                seat.hung = True
                if fault.seconds is not None:
                    asyncio.get_running_loop().call_later(fault.seconds, self._let_go_on, seat, process)
            case "fail":
                process.tell({"t": "answer", "do": "raise"}, cloudpickle.dumps(fault.error))
            case "lose":
                index, asked = seat.firing, seat.asked
                self._relay.on_drop = lambda: self._lost_ack(index, seat, asked)
                self._relay.arm(asked["channel"], asked["tag"])
                process.tell({"t": "answer", "do": "lose"})
                seat.firing = None
                return
        self.fired[seat.firing] += 1
        seat.firing = None

    def _let_go_on(self, seat: Seat, process: WorkerProcess) -> None:
        if seat.process is process and process.exit_status is None:
            process.signal(signal.SIGCONT)
            self._note("continued", seat.lane)
            seat.hung = False

    def _lost_ack(self, index: int, seat: Seat, asked: dict[str, Any]) -> None:
        self.fired[index] += 1
        self._note("ack.dropped", "broker", detail={"relay": self._relay.log[-1]}, **_about(asked))

    # -- the end

    async def _until_quiet(self) -> None:
        while not self._quiet():
            everyone_waits = all(seat.idle and not seat.running for seat in self.seats) and self._published
            try:
                await asyncio.wait_for(self._changed.wait(), _STALL_S if everyone_waits else None)
            except TimeoutError:
                return
            self._changed.clear()

    def _quiet(self) -> bool:
        if self._ending or self._recount:
            return True
        if not self._published or any(seat.running and not seat.hung for seat in self.seats):
            return False
        outstanding = self.account.outstanding
        if not outstanding:
            return True
        if not all(seat.idle or seat.hung for seat in self.seats) or any(seat.hung and self._hang_ends(seat) for seat in self.seats):
            return False
        held = {seat.lane: self.account.held[seat.lane] for seat in self.seats}
        everywhere = {position for tags in held.values() for position in tags.values()}
        full = all(len(tags) >= self.plan.prefetch for tags in held.values())
        if everywhere != outstanding and not (full and not self.plan.automatic):
            return False
        unanswered = [position for seat in self.seats if not seat.hung for position in held[seat.lane].values()]
        if unanswered:
            key = self.plan.messages[unanswered[0] - 1].effect_key
            self._stuck = f"the handler returned without an ack, nack or reject for {key}, so its delivery was never settled"
        else:
            self._end("stopped", "a worker hung with its delivery, and nothing else was left to do")
        return True

    def _hang_ends(self, seat: Seat) -> bool:
        return any(fault.kind == "hang" and fault.seconds is not None for fault in self.plan.faults)

    async def _dismiss(self) -> None:
        """Has every worker leave, kills those that do not, and reads their traces to the end."""
        self._dismissed = True
        present = [seat for seat in self.seats if seat.process and seat.process.exit_status is None]
        for seat in present:
            if seat.hung or seat.running:
                seat.process.signal(signal.SIGKILL)
            else:
                seat.process.tell({"t": "stop"})
        try:
            await self._until_gone(present)
        except TimeoutError:
            for seat in present:
                seat.process.signal(signal.SIGKILL)
            await self._until_gone(present)
        self._read()
        for seat in present:
            self.account.release(seat.lane)
            seat.process.discard()
            seat.process = None
        self._dismissed = False

    async def _until_gone(self, seats: list[Seat]) -> None:
        async with asyncio.timeout(_FAREWELL_S):
            while any(seat.process.exit_status is None for seat in seats):
                self._changed.clear()
                await self._changed.wait()

    async def _ready(self) -> int:
        """Returns how many messages the work queue holds, now that nobody consumes from it."""
        while True:
            ready, consumers = await self._channel.count(self._work)
            if not consumers:
                return ready

    async def _take_leave(self) -> dict[int, str] | None:
        """Returns where each copy is, or None when the broker cannot be asked."""
        try:
            async with asyncio.timeout(3 * _FAREWELL_S):
                await self._dismiss()
                if self._ending == "unreachable":
                    return None
                await self._find_the_rest()
        except (TimeoutError, BrokerError):
            if not self._reason:
                self._end("unreachable", "the broker did not answer at the end of the run")
            return None
        return self.account.where

    async def _find_the_rest(self) -> None:
        """Compares the queue with the account; where they differ, looks at what the queue holds."""
        outstanding = self.account.outstanding
        if not (ready := await self._ready()) and not outstanding:
            return
        if ready != len(outstanding) or any(self.account.where[position] == REJECTED for position in outstanding):
            found = await self._channel.drain(self._work, ready)
            for position in list(outstanding - found):
                self.account.move(position, VANISHED)
            for position in found:
                self.account.move(position, WAITING)

    async def _where_they_are(self) -> str:
        """Asks running workers which line they are at, and returns it in words."""
        self._read()
        for seat in self.seats:
            if seat.running and not seat.hung and seat.process:
                self._dump = bytearray()
                seat.process.signal(signal.SIGUSR1)   # faulthandler, in the worker, prints where it is
                try:
                    async with asyncio.timeout(1):
                        while not (told := origin.from_dump(self._dump.decode(errors="replace"), self.plan.files)):
                            self._changed.clear()
                            await self._changed.wait()
                    return f" while the handler was still running, {told}"
                except TimeoutError:
                    pass
                finally:
                    self._dump = None
        return ""

    def _take_print(self, data: bytes) -> None:
        if self._dump is not None:
            self._dump += data
        else:
            self._printed_bytes += len(data)
            self._printed += data[:max(0, _PRINTED_BYTES - len(self._printed))]
        self._changed.set()

    def _end(self, ending: str, reason: str) -> None:
        if not self._ending:
            self._ending, self._reason = ending, reason
            self._changed.set()

    def _note(self, name: str, lane: str, detail: dict | None = None, **about: Any) -> None:
        event = Event((time.monotonic_ns() - self._started_ns) / 1e6, lane, name, steps.NOTE, detail=detail or {}, **about)
        self.events.append(event)
        self.account.take(event)

    def _facts(self, where: dict[int, str] | None) -> Facts:
        self.events.sort(key=lambda event: event.at_ms)
        errors = [text + (f" — {times} times" if times > 1 else "") for text, times in self._errors.most_common(_MAX_ERRORS)]
        return Facts(settings=self.plan.settings, planned=[str(fault) for fault in self.plan.faults], fired=self.fired, effects=None, where=where,
                     ending=self._ending or "over", reason=self._reason, printed=self._printed.decode(errors="replace"),
                     printed_bytes=self._printed_bytes, errors=errors, misuse=self._misuse, stuck=self._stuck)


def _about(asked: dict[str, Any]) -> dict[str, Any]:
    return {field: asked[field] for field in ("message_id", "position", "attempt", "tag")}
