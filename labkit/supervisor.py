"""The supervisor: carries one run out, from the first declaration to the moment when nothing more can happen.

It seats the workers, hears them, fires the planned faults, and buries the dead. What they are there for, and when they are done, is told
by its two kinds: `consuming.Consuming` and `producing.Producing`. All of it on the controller thread.
"""

import asyncio
import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

from labkit.amqp import Channel
from labkit.broker.address import Address
from labkit.chronicle import Chronicle
from labkit.crew import Crew
from labkit.errors import BrokerError, HandlerError, LabError
from labkit.facts import Facts
from labkit.faults import PRODUCER
from labkit.firing import Firing
from labkit.message import Message
from labkit.prints import Prints
from labkit.provider.tab import Tab
from labkit.relay import Relay
from labkit.seat import Seat
from labkit.stepping import Stepping
from labkit.table import plain
from labkit.trace import Event

MAX_UNPLANNED_DEATHS = 5
_FAREWELL_S = 2                                       # for workers to leave, and for a last answer of the broker


class Supervisor:
    """One run under way. `carry_out` returns its facts; `events` grows meanwhile, and is in order within each lane.

    queue: the work queue while its length tells something, else None; `tab` is given to it: what it has to do with the provider.
    """

    tab: Tab

    def __init__(self, plan: Any, crew: Crew, channel: Channel, address: Address, prefix: str, number: int, version: str):
        self._plan, self._crew, self._channel, self._address, self._version = plan, crew, channel, address, version
        self._chronicle = Chronicle(plan, self._exceed)
        self.events, self.account = self._chronicle.events, self._chronicle.account
        self.firing = Firing(plan.faults, self._note) if plan.order is None else Stepping(plan.order, plan.seed, plan.workers, self._note)
        self._prints = Prints()
        self._published: list[Message] = []           # what handlers and producers left at the broker
        self._seats: list[Seat] = []
        self.queue: str | None = None
        self._via: Address | None = None       # the relay's address, where one is needed
        self._changed = asyncio.Event()
        self._dismissing = False
        self._deaths = 0
        self._ending = self._reason = self._stuck = ""
        self._patience: asyncio.Timeout | None = None                         # how long the broker may take to tell what is left
        self._failure: LabError | None = None

    async def carry_out(self) -> Facts:
        """Does the run. Raises BrokerError when it cannot begin, HandlerError when a worker cannot use the handler."""
        self._channel.on_end = self._lose_broker
        try:
            if self.firing.needs_relay:
                self.firing.relay = Relay(self._address.host, self._address.port)
                self._via = replace(self._address, **await self.firing.relay.start())
            await self._open()
            try:
                async with asyncio.timeout(self._plan.deadline_s):
                    await self._work_it_off()
            except TimeoutError:
                self._end("deadline", f"the deadline of {self._plan.deadline_s:g} s passed" + await self._where_it_is())
            except BrokerError as error:
                self._lose_broker(error)
            where = await self._take_leave()
            if self._failure:
                raise self._failure
            charges = self._chronicle.count_charges(await self.tab.charges())
            return replace(self._facts(where), charges=charges)
        finally:
            self._dismissing = True
            for seat in self._seats:
                if seat.process:
                    seat.process.signal(signal.SIGKILL)
                    seat.process.discard()
            if self.firing.relay:
                await self.firing.relay.close()
            self._close()
            self._crew.refill()

    def look(self) -> tuple[list[Event], list[int], dict[int, list[str]]]:
        """Returns what is known by now: events, how often each fault fired, and where each copy is."""
        self.catch_up()
        return list(self.events), list(self.firing.fired), self.account.places

    async def charges_so_far(self) -> dict[str, int] | None:
        """Returns effect key -> charges that the provider made for this run; None when they are not known."""
        charges = await self.tab.charges(settled=False)
        return None if charges is None else dict(Counter(effect_key for _, effect_key, _ in charges))

    def catch_up(self) -> float:
        """Reads what the traces hold by now, and returns the time, in milliseconds since the run began."""
        known = len(self.events)
        self._read()
        if len(self.events) > known:                  # whoever waits for news would miss what was read here
            self._changed.set()
        return self._chronicle.now_ms

    async def open_channel(self) -> Channel:
        """Returns another channel of the same connection. Raises BrokerError."""
        return await self._channel.open_another()

    def stop(self) -> None:
        """Ends the run at once, as a person asked."""
        self._end("stopped", "the run was stopped by hand")

    def kill(self, worker: int) -> None:
        """Kills a worker process, as a person asked."""
        for seat in self._seats:
            if seat.number == worker and seat.process:
                seat.by_hand = True
                seat.process.signal(signal.SIGKILL)

    # -- what the two kinds of runs tell

    async def _open(self) -> None:
        """Declares and publishes what must be there first. Raises BrokerError."""
        raise NotImplementedError

    def _close(self) -> None:
        """Removes what was declared, without waiting."""
        raise NotImplementedError

    def _job(self, seat: Seat) -> tuple[dict[str, Any], bytes]:
        """Returns what the process of this seat is to do, and the pickled function to do it with."""
        raise NotImplementedError

    async def _work_it_off(self) -> None:
        """Seats whom it needs, and returns when nothing more can happen, or `_ending` says why not."""
        raise NotImplementedError

    def _replace(self, seat: Seat) -> None:
        """Decides what follows the death of this seat's process."""
        raise NotImplementedError

    async def _find_the_rest(self) -> dict[int, list[str]]:
        """Returns where each copy is, now that all have left."""
        raise NotImplementedError

    def _blocked(self) -> str | None:
        """Returns the broker's reason for taking no messages, where the run waits for that."""
        raise NotImplementedError

    # -- while they work

    def _seat(self, seat: Seat) -> None:
        process, plan = self._crew.take(self._via), self._plan
        seat.sit(process)
        process.on_frame = lambda frame: self._hear(seat, frame)
        process.on_print = self._prints.take
        process.on_end = lambda: seat.process is process and self._bury(seat)
        job, blob = self._job(seat)
        process.give({"armed": self.firing.armed, "ledger": plan.ledger.wire, "worker": seat.number, "folder": os.getcwd(), "path": sys.path,
                      "queue": None, "again": False, "draining": False, "consumer": plan.consumer, "forget_after": None, **job}, blob)
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
            case "provider":
                self.tab.serve(seat.process, frame["refused"], lambda error: self._fail(error, "the provider could not be reached"))
            case "unreachable":
                self._end("unreachable", f"the connection to the broker ended: {seat.lane} cannot reach it any more: {frame['error']}")
            case "unusable":
                self._fail(HandlerError("A worker process could not load the handler.", frame["error"],
                                        "Import what it needs inside the handler, or keep helper files beside the notebook."), "the handler could not be loaded")
        self._changed.set()

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
            self._chronicle.blame(f"{seat.lane} ended by itself, " + (f"with status {status}" if status >= 0 else f"by signal {-status}"))
            self._deaths += seat.role != PRODUCER     # which is not replaced
        seat.process.discard()
        seat.process = None
        if self._deaths > MAX_UNPLANNED_DEATHS:
            self._end("gave up", f"the worker processes ended by themselves {self._deaths} times, so the supervisor gave up")
        else:
            self._replace(seat)

    def _lose_broker(self, error: BrokerError) -> None:
        self._end("unreachable", f"the connection to the broker ended: {error.why or error.what}")

    def _exceed(self, effect_key: str) -> None:
        self._end("max_deliveries", f"{plain(effect_key)} was delivered more than {self._plan.max_deliveries} times, so the run was stopped")

    def _fail(self, error: LabError, reason: str) -> None:
        self._failure = error
        self._end("stopped", reason)

    def _end(self, ending: str, reason: str) -> None:
        if not self._ending:
            self._ending, self._reason = ending, reason
        self._changed.set()

    def _note(self, name: str, lane: str, detail: dict | None = None, **about: Any) -> None:
        self._chronicle.note(name, lane, detail, **about)
        self._changed.set()

    # -- the end

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

    async def _take_events(self, queue: str) -> None:
        """Takes what was published out of its queue, however much it is, as long as the broker goes on answering."""
        def answered() -> None:
            self._patience.reschedule(asyncio.get_running_loop().time() + 3 * _FAREWELL_S)
        self._published = await self._channel.take_all(queue, answered)

    async def _take_leave(self) -> dict[int, list[str]] | None:
        """Returns where each copy is, or None when the broker cannot be asked."""
        try:
            async with asyncio.timeout(3 * _FAREWELL_S) as self._patience:
                await self._dismiss()
                if self._ending == "unreachable" or self._channel.blocked:
                    return None
                return await self._find_the_rest()
        except (TimeoutError, BrokerError):
            self._end("unreachable", "the run came to its end")
            self._reason += ", and then the broker did not answer any more"
            return None

    async def _where_it_is(self) -> str:
        """Returns, in words, what the run was waiting for: a broker that takes no messages, or the line of a handler."""
        if told := self._blocked():
            return f" while RabbitMQ took no messages: {told}"
        self._read()
        if told := self._locked():
            return told
        for seat in self._seats:
            if seat.at_work and (told := await self._prints.where(seat.process, self._plan.files)):
                return f" while {seat.called} was still running, {told}"
        return ""

    def _locked(self) -> str:
        """Returns, in words, which frozen worker keeps the others from the ledger."""
        return next((f" while {seat.lane}, frozen inside a transaction, held the ledger's lock" for seat in self._seats
                     if seat.hung and self._chronicle.in_transaction(seat.lane)), "")

    def _facts(self, where: dict[int, list[str]] | None) -> Facts:
        return Facts({**self._plan.settings(), "broker": self._version}, [str(fault) for fault in self._plan.faults], self.firing.fired,
                     effects=None, where=where, ending=self._ending or "over", reason=self._reason, printed=self._prints.text,
                     printed_bytes=self._prints.total_bytes, errors=self._chronicle.errors, misuse=self._chronicle.misuse, stuck=self._stuck, choices=self.firing.choices,
                     published=[message.as_dict() for message in self._published])
