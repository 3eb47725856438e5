"""A run that produces: producers place orders and publish events, relays publish what they left in the outbox, until nothing is left to do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit import ledger, outbox, ship, steps, topology
from labkit.errors import PlanError
from labkit.faults import PRODUCER, RELAY, Fault
from labkit.plan import check_faults, one_of, positive
from labkit.production import Production
from labkit.seat import Seat
from labkit.supervisor import Supervisor
from labkit.table import plain

_NOT_TAKEN = {"nacked", "returned", "blocked", "not sent"}


@dataclass(frozen=True)
class ProducePlan:
    """What is to be produced; see `Lab.produce`. `blobs` and `files` are the functions as they travel; `ledger` is the place of the ledger."""

    producer: Callable
    ledger: Any
    relay: Callable | None = None
    faults: Sequence[Fault] = ()
    producers: int = 1
    relays: int = 1
    relay_starts: str = "after"
    max_length: int | None = None
    deadline_s: float = 15
    blobs: dict[str, bytes] = field(init=False, repr=False)
    files: dict[str, str] = field(init=False, repr=False)

    messages, automatic, dead_letter, order, seed = (), False, True, None, None                              # there are no deliveries
    max_deliveries = 20                               # publishes of one event, after which a relay is taken to go on for ever
    result = Production

    def __post_init__(self):
        for name in ("producers", "relays"):
            positive(name, getattr(self, name), int)
        if self.max_length is not None:
            positive("max_length", self.max_length, int)
        positive("deadline_s", self.deadline_s, (int, float))
        one_of("relay_starts", self.relay_starts, "after", "beside")
        functions = {PRODUCER: self.producer} | ({RELAY: self.relay} if self.relay else {})
        if not self.relay and (self.relays, self.relay_starts) != (1, "after"):
            raise PlanError("It is said how relays start, or how many.", "there is none", "Give one: relay=publish_outbox.")
        object.__setattr__(self, "faults", check_faults(self.faults, {PRODUCER: self.producers} | ({RELAY: self.relays} if self.relay else {})))
        for fault in self.faults:
            if fault.attempt not in (None, 1):
                raise PlanError(f"{fault} is planned for attempt {fault.attempt}.", "attempts are those of a delivery, and here is none", "Use nth=2 for the second time.")
            if isinstance(fault.message, int):
                raise PlanError(f"{fault} is planned for message {fault.message}.", "what a producer publishes has no position before it is published",
                                'Name the id of the event, as message="order-1".')
        object.__setattr__(self, "blobs", {role: ship.pack(function, role, "shop") for role, function in functions.items()})
        object.__setattr__(self, "files", {name: file for function in functions.values() for name, file in ship.files(function).items()})

    @property
    def workers(self) -> int:
        """How many processes there are."""
        return self.producers + self.relays * (self.relay is not None)

    @property
    def consumer(self) -> str:
        """The name in the inbox of the producers' ledger."""
        return ship.name_of(self.producer)

    def known(self, position: Any) -> None:
        """There are no positions: nothing was published beforehand."""

    def settings(self) -> dict[str, Any]:
        """Returns what shaped the run, as JSON values, for its result."""
        return {"producer": ship.name_of(self.producer), "relay": self.relay and ship.name_of(self.relay), "producers": self.producers,
                "relays": self.relays, "relay_starts": self.relay_starts, "max_length": self.max_length}

    def ask(self) -> dict[str, Any]:
        """Returns what the ledger holds, for the facts. Raises LedgerError."""
        return {"effects": ledger.count_effects(self.ledger), "outbox": outbox.count_waiting(self.ledger)}


class Producing(Supervisor):
    """The supervisor of `Lab.produce`. A producer that dies is not replaced: whoever waited for its answer has got an error. A relay is."""

    def __init__(self, plan: ProducePlan, crew: Any, channel: Any, address: Any, prefix: str, number: int, version: str):
        super().__init__(plan, crew, channel, address, prefix, number, version)
        self._events, self._declared = topology.events_queue(prefix, number), topology.events_arguments(plan.max_length)
        self._draining = False

    async def _open(self) -> None:
        await self._channel.declare({self._events: self._declared})

    def _close(self) -> None:
        self._channel.give_back(self._events)

    def _job(self, seat: Seat) -> tuple[dict[str, Any], bytes]:
        return {"events": self._events, "declared": self._declared, "again": seat.role == RELAY, "draining": self._draining}, self._plan.blobs[seat.role]

    def _seat(self, seat: Seat) -> None:
        super()._seat(seat)
        seat.running = seat.process is not None

    async def _work_it_off(self) -> None:
        plan = self._plan
        producers = [Seat(number, PRODUCER) for number in range(1, plan.producers + 1)]
        relays = [Seat(number, RELAY) for number in range(1, plan.relays + 1)] if plan.relay else []
        await self._finish(producers, beside=relays if plan.relay_starts == "beside" else [])
        self._draining = True
        for seat in relays:
            if seat.process:
                seat.idle = False                     # it has not looked since the last producer ended
                seat.process.tell({"t": "drain"})
        await self._finish(relays)

    def _replace(self, seat: Seat) -> None:
        if seat.role == RELAY:
            self._seat(seat)

    async def _find_the_rest(self) -> dict[int, list[str]]:
        await self._take_events(self._events)
        return {}

    def _exceed(self, effect_key: str) -> None:
        outcomes = {event.detail.get("outcome") for event in self.events if event.name == steps.CONFIRM and event.phase == steps.AFTER and event.effect_key == effect_key}
        if outcomes and outcomes <= _NOT_TAKEN:
            self._end("stopped", f"the event of {plain(effect_key)} was sent more than {self._plan.max_deliveries} times and never taken, so the run was stopped")
        self._end("max_deliveries", f"the event of {plain(effect_key)} was published more than {self._plan.max_deliveries} times, so the run was stopped")

    def _blocked(self) -> str | None:
        return self._channel.blocked

    async def _finish(self, seats: list[Seat], beside: list[Seat] = ()) -> None:
        """Seats those who have no place yet, and returns when each of `seats` is done, dead or frozen for good."""
        for seat in [seat for seat in (*seats, *beside) if seat not in self._seats]:
            self._seats.append(seat)
            self._seat(seat)
        while not self._ending and not all(seat.idle or seat.hung == "for good" or not seat.process for seat in seats):
            self._changed.clear()
            await self._changed.wait()
