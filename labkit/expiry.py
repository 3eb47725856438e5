"""What a broker loses that is killed while its delay queues expire: one kill for all kinds of delay queue, and a count.

Each kind has several delay queues, as a work queue has that needs several delays, since chance decides anew for each: after
its start the broker has a delay queue ready before its target, or the other way round, and what expires meanwhile goes
nowhere. With at-least-once dead-lettering it stays in the delay queue until the target has confirmed it.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from labkit import controller, topology
from labkit.aftermath import channel_on, kill_and_start, take_out
from labkit.amqp import ANSWER_S, Channel, Session
from labkit.broker import Broker
from labkit.errors import BrokerError
from labkit.message import Message
from labkit.topology_check import check_topology

#: so long a message waits; long enough that a hiccup of the machine does not put the kill behind the end of the expiry
DELAY_MS = 1000
ALWAYS = "at-least-once"
_KINDS = (("classic", "at-most-once"), ("quorum", "at-most-once"), ("quorum", ALWAYS))
_QUEUES = 4                                           # of each kind
_CHUNK = 100                                          # so many for one queue, then for the next, so that all expire at the same time
_DIRECT = Message("the first one")


@dataclass(frozen=True)
class ExpiryRow:
    """One kind of delay queue, and what came of the messages in it. `before` had arrived when the broker was killed."""

    queue: str
    strategy: str
    published: int
    before: int
    arrived: int
    twice: int

    @property
    def lost(self) -> int:
        """How many never arrived."""
        return self.published - self.arrived

    @property
    def hit(self) -> bool:
        """Tells whether the kill fell into the expiry: some messages had arrived, and not all."""
        return 0 < self.before < self.published

    @property
    def kill(self) -> str:
        """When the kill came, in words."""
        return "in the middle" if self.hit else "too late" if self.before else "too early"


@dataclass(frozen=True)
class Expiry:
    """The rows of one experiment, judged by what at-least-once dead-lettering promises."""

    rows: list[ExpiryRow] = field(repr=False)

    CAPTION = "the broker's process was killed while the delay queues expired, and started again"
    COLUMNS = ("delay queue", "dead-lettering", "published", "kill", "arrived before it", "arrived", "lost", "arrived twice")

    @property
    def promised(self) -> ExpiryRow:
        """The row of the kind that may lose nothing."""
        return next(row for row in self.rows if row.strategy == ALWAYS)

    @property
    def verdict(self) -> str:
        """"broken" if at-least-once dead-lettering lost a message, "unknown" if the kill missed its expiry, else "holds"."""
        return "broken" if self.promised.lost else "holds" if self.promised.hit else "unknown"

    @property
    def why(self) -> str:
        """The reason for the verdict, in one sentence."""
        row = self.promised
        if self.verdict == "unknown":
            return f"the kill came {row.kill}: {row.before:,} of {row.published:,} messages had arrived, so nothing is proven"
        return f"at-least-once dead-lettering lost {row.lost:,} of {row.published:,} messages"

    @property
    def cells(self) -> list[list]:
        """The rows as they are shown."""
        return [[row.queue, row.strategy, row.published, row.kill, row.before, row.arrived, row.lost, row.twice] for row in self.rows]

    def __repr__(self) -> str:
        from labkit import report
        return report.experiment_text(self)

    def _repr_html_(self) -> str:
        from labkit import report
        return report.experiment_html(self)


@dataclass(frozen=True)
class _Pair:
    """A delay queue, its target, and the messages that go through them."""

    kind: tuple[str, str]
    delay: str
    target: str
    messages: list[Message]


def expire(broker: Broker, prefix: str, run: int, messages: int) -> Expiry:
    """Publishes `messages` to each kind of delay queue, kills the node while they expire, starts it, and counts. Raises BrokerError."""
    broker.require_own("killed")
    all_of_a_kind = [Message(f"message-{number}") for number in range(messages)]
    names = ((topology.expiry_queue(prefix, run, number), topology.expired_queue(prefix, run, number)) for number in range(1, len(_KINDS) * _QUEUES + 1))
    pairs = [_Pair(kind, *next(names), all_of_a_kind[share::_QUEUES]) for share in range(_QUEUES) for kind in _KINDS]
    queues = {pair.target: topology.expired_arguments() for pair in pairs}
    queues |= {pair.delay: topology.delay_arguments(pair.target, DELAY_MS, pair.kind[0], pair.kind[1] == ALWAYS) for pair in pairs}
    check_topology(queues)
    try:
        with channel_on(broker) as channel:
            for queue, arguments in queues.items():
                channel.queue_declare(queue, durable=True, arguments=arguments)
        broker.settle()                               # else a quorum queue may be gone because it is new
        before = controller.carry_out(_publish_and_watch(broker, pairs))
        kill_and_start(broker)
        with channel_on(broker) as channel:
            channel.confirm_delivery()
            for pair in pairs:                        # a confirm says that the target is there: what expires from now on arrives
                channel.basic_publish("", pair.target, _DIRECT.body(), mandatory=True)
            found = [take_out(channel, pair.target, (len(pair.messages) + 1) * (pair.kind[1] == ALWAYS), through=pair.delay) for pair in pairs]
    finally:
        with suppress(BrokerError), channel_on(broker) as channel:
            for queue in queues:
                channel.queue_delete(queue)
    rows = []
    for kind in _KINDS:
        bodies = [[came[message.body()] for message in pair.messages] for pair, came in zip(pairs, found) if pair.kind == kind]
        times = sum(bodies, [])
        rows.append(ExpiryRow(*kind, messages, before[kind], sum(map(bool, times)), sum(number > 1 for number in times)))
    return Expiry(rows)


async def _publish_and_watch(broker: Broker, pairs: list[_Pair]) -> dict[tuple[str, str], int]:
    """Publishes, and returns how many of each kind have arrived, as soon as that is some of each kind; or all of one, or too late."""
    session = await Session.open(broker.address)
    try:
        channels = [await session.channel() for _ in pairs]
        for start in range(0, max(len(pair.messages) for pair in pairs), _CHUNK):
            await asyncio.gather(*[_publish(channel, pair, start) for channel, pair in zip(channels, pairs)])
        before = dict.fromkeys(_KINDS, 0)
        with suppress(TimeoutError):
            async with asyncio.timeout(DELAY_MS / 1000 + ANSWER_S):
                while not all(before.values()):
                    counts = [(await channels[0].count(pair.target))[0] for pair in pairs]
                    before = {kind: sum(count for count, pair in zip(counts, pairs) if pair.kind == kind) for kind in _KINDS}
                    if any(came >= sum(len(pair.messages) for pair in pairs if pair.kind == kind) for kind, came in before.items()):
                        break
        return before
    finally:
        session.close()


async def _publish(channel: Channel, pair: _Pair, start: int) -> None:
    """Publishes one chunk, and returns when it is confirmed."""
    def hear(_: int, outcome: str) -> None:
        if outcome != "confirmed":
            raise BrokerError(f"RabbitMQ {outcome} a message of the experiment.", "its queue is gone, or full", "Run the cell again.")
    await channel.publish(pair.delay, list(enumerate(pair.messages[start:start + _CHUNK], 1)), hear)
