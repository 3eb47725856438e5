"""What a killed broker still holds: one queue for each kind of queue, of message and of publishing, one kill, and a count.

The messages that nobody confirms go out last, to all their queues in turn, and the kill follows the last one: what RabbitMQ
has of them on its disk by then is chance, and is told as it came out.
"""

import itertools
from contextlib import suppress
from dataclasses import dataclass, replace

import pika
from pika.exceptions import ConnectionClosedByBroker

from labkit import topology
from labkit.aftermath import channel_on, kill_and_start, take_out
from labkit.broker import Broker
from labkit.errors import BrokerError

_KINDS = (("classic", True), ("classic", False), ("quorum", True))           # type of the queue, and whether it is durable


@dataclass(frozen=True)
class SurvivalRow:
    """One queue, and what came of the messages in it. `survived` is None where the broker refuses such a queue."""

    queue: str
    durable: bool
    persistent: bool
    confirmed: bool
    published: int = 0
    survived: int | None = None

    @property
    def stored(self) -> bool:
        """Tells whether RabbitMQ writes the messages down, sooner or later: a quorum queue does so with transient ones too."""
        return self.durable and (self.persistent or self.queue == "quorum")

    @property
    def promised(self) -> bool:
        """Tells whether RabbitMQ promises that the messages survive."""
        return self.stored and self.confirmed

    @property
    def by_chance(self) -> bool:
        """Tells whether another experiment may come out otherwise."""
        return self.stored and not self.confirmed

    @property
    def word(self) -> str:
        """How many survived, in a word: "all", "some" or "none"."""
        if self.survived is None:
            return "refused by this broker"
        return "all" if self.survived == self.published else "some" if self.survived else "none"


class Survival:
    """The rows of one experiment, judged by what RabbitMQ promises."""

    CAPTION = "the broker's process was killed, and started again"
    COLUMNS = ("queue", "message", "publisher", "published", "survived", "kept", "promised")

    def __init__(self, rows: list[SurvivalRow]):
        self.rows = rows

    @property
    def certain(self) -> "Survival":
        """The rows that come out the same each time."""
        return Survival([row for row in self.rows if not row.by_chance])

    @property
    def verdict(self) -> str:
        """"holds" if every message survived that was promised to, else "broken"."""
        return "holds" if all(row.word == "all" for row in self.rows if row.promised) else "broken"

    @property
    def why(self) -> str:
        """The reason for the verdict, in one sentence."""
        persistent, transient = self._promised(persistent=True), self._promised(persistent=False)
        return (f"{persistent} confirmed messages survived that were persistent in a durable queue, "
                f"and {transient} that were transient in a quorum queue")

    @property
    def cells(self) -> list[list]:
        """The rows as they are shown."""
        return [[f"{row.queue}, {'durable' if row.durable else 'not durable'}", "persistent" if row.persistent else "transient",
                 "confirmed" if row.confirmed else "not confirmed", row.published, row.survived, row.word, "yes" if row.promised else "no"] for row in self.rows]

    def __repr__(self) -> str:
        from labkit import report
        return report.experiment_text(self)

    def _repr_html_(self) -> str:
        from labkit import report
        return report.experiment_html(self)

    def _promised(self, persistent: bool) -> str:
        rows = [row for row in self.rows if row.promised and row.persistent == persistent]
        return f"{sum(row.survived for row in rows):,} of {sum(row.published for row in rows):,}"


def survive(broker: Broker, prefix: str, run: int, messages: int) -> Survival:
    """Publishes `messages` to each queue, kills the node, starts it, and takes out what is left. Raises BrokerError."""
    broker.require_own("killed")
    rows = [SurvivalRow(*kind, persistent, confirmed) for kind, persistent, confirmed in itertools.product(_KINDS, (True, False), (True, False))]
    queues = {topology.survival_queue(prefix, run, number): row for number, row in enumerate(rows, 1)}
    try:
        there = {queue: replace(row, published=messages) for queue, row in queues.items() if _declare(broker, queue, row)}
        broker.settle()                               # else a quorum queue may be gone because it is new
        with channel_on(broker) as channel:
            channel.confirm_delivery()                # from here on each publish waits for its confirm
            for queue, row in there.items():
                if row.confirmed:
                    _publish(channel, {queue: row}, messages)
        with channel_on(broker) as channel:
            _publish(channel, {queue: row for queue, row in there.items() if not row.confirmed}, messages)
            kill_and_start(broker)
        with channel_on(broker) as channel:
            channel.confirm_delivery()
            counted = {queue: replace(row, survived=len(take_out(channel, queue))) for queue, row in there.items()}
    finally:
        with suppress(BrokerError), channel_on(broker) as channel:
            for queue in queues:
                channel.queue_delete(queue)
    return Survival([counted.get(queue, row) for queue, row in queues.items()])


def _declare(broker: Broker, queue: str, row: SurvivalRow) -> bool:
    """Declares a queue; false where the broker refuses queues that are not durable, for which it ends the connection."""
    with channel_on(broker) as channel:
        try:
            channel.queue_declare(queue, durable=row.durable, arguments=topology.survival_arguments(row.queue))
        except ConnectionClosedByBroker as error:
            if row.durable or "transient_nonexcl_queues" not in error.reply_text:
                raise
            return False
    return True


def _publish(channel, queues: dict[str, SurvivalRow], messages: int) -> None:
    """Publishes to the queues in turn. When this returns, all is handed to the socket."""
    modes = {True: pika.DeliveryMode.Persistent, False: pika.DeliveryMode.Transient}
    for number in range(messages):
        for queue, row in queues.items():
            channel.basic_publish("", queue, str(number).encode(), pika.BasicProperties(delivery_mode=modes[row.persistent]))
