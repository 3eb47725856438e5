"""How long a delay really takes: messages wait in delay queues, and the clock runs until each is back. Plain pika."""

import time
from collections.abc import Iterable

import pika

from labkit import topology
from labkit.aftermath import channel_on
from labkit.amqp import ANSWER_S
from labkit.broker import Broker
from labkit.errors import BrokerError, PlanError
from labkit.plan import many, one_of
from labkit.topology_check import check_topology

ONE_EACH, ONE_FOR_ALL = "one queue per delay", "one queue"
_NOW = 'Write [(2000, "slow"), (100, "fast")].'


def measure(broker: Broker, prefix: str, run: int, plan: Iterable[tuple[int, str]], arrangement: str, queue_type: str) -> dict[str, float]:
    """Publishes the messages of the plan, and returns name -> ms until it came back; see `Lab.measure_delays`."""
    one_of("arrangement", arrangement, ONE_EACH, ONE_FOR_ALL)
    one_of("queue_type", queue_type, "quorum", "classic")
    plan = _checked(plan)
    back, work = {}, topology.expired_queue(prefix, run, 1)
    if arrangement == ONE_EACH:
        delays = {delay_ms: topology.expiry_queue(prefix, run, delay_ms) for delay_ms, _ in plan}
        queues = {queue: topology.delay_arguments(work, delay_ms, queue_type, queue_type == "quorum") for delay_ms, queue in delays.items()}
    else:
        delays = dict.fromkeys([delay_ms for delay_ms, _ in plan], topology.expiry_queue(prefix, run, 0))
        queues = {queue: topology.delay_arguments(work, None, queue_type, queue_type == "quorum") for queue in delays.values()}
    queues = {work: topology.expired_arguments()} | queues
    check_topology(queues)
    with channel_on(broker) as channel:
        try:
            for queue, arguments in queues.items():
                channel.queue_declare(queue, durable=True, arguments=arguments)
            channel.basic_consume(work, lambda _, __, ___, body: back.setdefault(body.decode(), time.monotonic()), auto_ack=True)
            sent = {}
            for delay_ms, name in plan:               # not confirmed one by one, which takes time: a message that does not come back is told
                sent[name] = time.monotonic()
                own_delay = str(delay_ms) if arrangement == ONE_FOR_ALL else None
                channel.basic_publish("", delays[delay_ms], name.encode(), pika.BasicProperties(
                    delivery_mode=pika.DeliveryMode.Persistent, expiration=own_delay))
            deadline = time.monotonic() + max(delays) / 1000 + ANSWER_S
            while len(back) < len(plan) and time.monotonic() < deadline:
                channel.connection.process_data_events(time_limit=deadline - time.monotonic())
        finally:
            for queue in queues:
                if channel.is_open:
                    channel.queue_delete(queue)
    if missing := [name for name in sent if name not in back]:
        raise BrokerError(f"{missing[0]!r} did not come back from its delay.", f"RabbitMQ is overloaded; {len(missing)} of {len(plan)} are missing",
                          "Run `python3 -m labkit doctor`, then run the cell again.")
    return {name: 1000 * (came - sent[name]) for name, came in back.items()}


def _checked(plan: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    pairs = many("plan", plan, _NOW)
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], int) and not isinstance(pair[0], bool)
                and pair[0] > 0 and isinstance(pair[1], str) and pair[1]):
            raise PlanError(f"plan holds {pair!r}.", "it is no pair of a positive whole number of ms and a name", _NOW)
    if len({name for _, name in pairs}) < max(1, len(pairs)):
        raise PlanError("plan is empty, or names a message twice.", "each message is told apart by its name", _NOW)
    return list(pairs)
