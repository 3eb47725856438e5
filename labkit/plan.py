"""The plan of a run: the arguments of `Lab.run`, checked, and with the defaults that are said there."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit import ship
from labkit.errors import PlanError
from labkit.faults import WORKER, Fault
from labkit.ledger import count_effects
from labkit.message import Message
from labkit.result import Run
from labkit.retry import RetryPolicy
from labkit.terminal import records


MESSAGES_NOW, _FAULTS = "Use lab.reminders(5) or [Message(…)].", 'Use faults=[crash.after("ledger.record")] or its like.'
_MAX_PREFETCH = 65535
_MAX_KEPT = 2 ** 63 - 1


@dataclass(frozen=True)
class Plan:
    """What is to be run; see `Lab.run`. `blob` and `files` are the handler as it travels; `ledger` is the place of the ledger."""

    handler: Callable
    messages: Iterable[Message]
    ledger: Any
    faults: Sequence[Fault] = ()
    workers: int = 1
    prefetch: int = 1
    acknowledge: str = "manual"
    queue_type: str = "quorum"
    dead_letter: bool = True
    delivery_limit: int | None = None
    max_deliveries: int = 20
    retry: RetryPolicy | None = None
    forget_after: int | None = None
    publish: str = "first"
    rate: float | None = None
    deadline_s: float = 15
    order: Sequence[int] | None = None                # the workers' turns, in a stepped run; and who goes after them
    seed: int | None = None
    blob: bytes = field(init=False, repr=False)
    files: dict[str, str] = field(init=False, repr=False)

    result = Run

    def __post_init__(self):
        object.__setattr__(self, "messages", many("messages", self.messages, MESSAGES_NOW))
        one_of("acknowledge", self.acknowledge, "manual", "auto")
        one_of("queue_type", self.queue_type, "quorum", "classic")
        one_of("publish", self.publish, "first", "while")
        for name in ("workers", "prefetch", "max_deliveries"):
            positive(name, getattr(self, name), int)
        object.__setattr__(self, "faults", check_faults(self.faults, {WORKER: self.workers}))
        for name in ("deadline_s", "rate"):
            positive(name, getattr(self, name), (int, float, type(None)) if name == "rate" else (int, float))
        if self.rate is not None and self.publish == "first":
            raise PlanError(f"rate is {self.rate} with publish='first'.", "what is published first is published as fast as it can be",
                            'Leave it out, or write publish="while".')
        if self.forget_after is not None:
            positive("forget_after", self.forget_after, int)
            if self.forget_after > _MAX_KEPT:
                raise PlanError(f"forget_after is {self.forget_after}.", f"the databases count up to {_MAX_KEPT}", "Write a smaller number, or leave it out.")
        one_of("dead_letter", self.dead_letter, True, False)
        if self.prefetch > _MAX_PREFETCH:
            raise PlanError(f"prefetch is {self.prefetch}.", f"AMQP counts up to {_MAX_PREFETCH}", "Write a smaller number.")
        if self.delivery_limit is not None:
            positive("delivery_limit", self.delivery_limit, int)
            if self.queue_type != "quorum":
                raise PlanError(f"delivery_limit is {self.delivery_limit} on a {self.queue_type} queue.", "only quorum queues count deliveries",
                                'Leave it out, or write queue_type="quorum".')
        if self.retry is not None:
            if not isinstance(self.retry, RetryPolicy):
                raise PlanError(f"retry is {self.retry!r}.", "a RetryPolicy is expected", "Write retry=RetryPolicy(max_attempts=3, delays_ms=(100, 400)).")
            if self.automatic:
                raise PlanError("A retry is planned with acknowledge='auto'.", "the broker has forgotten a message that it has sent, so a crash would lose it",
                                "Leave one of the two out.")
            if self.retry.max_attempts > self.max_deliveries:
                raise PlanError(f"The policy has {self.retry.max_attempts} attempts, and the run stops after {self.max_deliveries} deliveries of a message.",
                                "max_deliveries is the smaller number", f"Write max_deliveries={2 * self.retry.max_attempts}, too.")
        _only("messages", self.messages, Message, MESSAGES_NOW)
        for fault in self.faults:
            if isinstance(fault.message, int) and fault.message > len(self.messages):
                raise PlanError(f"{fault} is planned for message {fault.message}.", f"only {len(self.messages)} are published", "Name a smaller number.")
        object.__setattr__(self, "blob", ship.pack(self.handler, along=self.retry))
        object.__setattr__(self, "files", ship.files(self.handler))

    @property
    def consumer(self) -> str:
        """The name of the consumer, whose inbox the ledger remembers messages in: the handler's."""
        return ship.name_of(self.handler)

    @property
    def automatic(self) -> bool:
        """Tells whether the broker counts a delivery as settled when it is sent."""
        return self.acknowledge == "auto"

    def known(self, position: Any) -> int | None:
        """Returns the position, or None where it is none of the published messages': a handler may publish what it likes."""
        return position if position in range(1, len(self.messages) + 1) else None

    def settings(self) -> dict[str, Any]:
        """Returns what shaped the run, as JSON values, for its result."""
        names = ("workers", "prefetch", "acknowledge", "queue_type", "dead_letter", "delivery_limit", "max_deliveries", "forget_after", "publish")
        return {"handler": ship.name_of(self.handler), "retry": self.retry and str(self.retry), **{name: getattr(self, name) for name in names}}

    def ask(self) -> dict[str, Any]:
        """Returns what the ledger holds, for the facts. Raises LedgerError."""
        return {"effects": count_effects(self.ledger), "records": records(self.ledger)}


def one_of(name: str, value: Any, *choices: Any) -> None:
    """Raises PlanError for a value that is none of the choices."""
    if value not in choices:
        raise PlanError(f"{name} is {value!r}.", "it is none of " + ", ".join(map(repr, choices)), f"Write {name}={choices[0]!r}.")


def positive(name: str, value: Any, kinds: Any) -> None:
    """Raises PlanError for a value that is no positive number of these kinds."""
    if not isinstance(value, kinds) or isinstance(value, bool) or (value is not None and not value > 0):
        raise PlanError(f"{name} is {value!r}.", "it must be a positive number", f"Leave it out, or write {name}=1.")


def many(name: str, values: Any, now: str) -> tuple:
    """Returns the values as a tuple. Raises PlanError when they are no list, or its like."""
    try:
        return tuple(values)
    except TypeError:
        raise PlanError(f"{name} is {values!r}.", "a list is expected", now) from None


def check_faults(faults: Any, numbers: dict[str, int]) -> tuple[Fault, ...]:
    """Returns the faults as a tuple. Raises PlanError for one that cannot happen among so many of each role."""
    faults = many("faults", faults, _FAULTS)
    _only("faults", faults, Fault, _FAULTS)
    for fault in faults:
        if fault.error is not None:
            ship.check_error(fault.error)
        if fault.worker is not None:
            role, number = (None, fault.worker) if isinstance(fault.worker, int) else (fault.worker.split()[0], int((fault.worker.split() + [1])[1]))
            there = numbers.get(role, 0) if role else max(numbers.values())
            if number > there:
                raise PlanError(f"{fault} is planned for {fault.worker if role else f'worker {number}'}.", f"only {there} are started" if there else "there is none",
                                "Name one of these: " + ", ".join(f"{role} {count}" for role, last in numbers.items() for count in range(1, last + 1)[:3]) + ".")
    return faults


def _only(name: str, values: tuple, kind: type, now: str) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise PlanError(f"{name} holds {value!r}, which is not a {kind.__name__}.", "something else was put into the list", now)
