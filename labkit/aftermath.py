"""A kill of the broker and what comes after it: a channel that may be dead at its end, and what a queue still hands out."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pika
from pika.exceptions import AMQPError, UnroutableError

from labkit import topology
from labkit.amqp import ANSWER_S
from labkit.broker import Broker
from labkit.broker.reach import told
from labkit.errors import BrokerError

_LAST = b"the last one"
_NEXT = "Run `python3 -m labkit doctor`, then run the cell again."


@contextmanager
def channel_on(broker: Broker) -> Iterator:
    """A channel on a connection of its own, which may be dead at the end. Raises BrokerError for pika's errors."""
    connection = reason = None
    try:
        connection = topology.connect(topology.wire(broker.address), blocked_connection_timeout=ANSWER_S)
        yield connection.channel()
    except AMQPError as error:
        reason = error
    finally:
        with suppress(AMQPError):
            connection and connection.close()
    if reason:
        raise told(broker.address, reason) if connection is None else BrokerError(
            "RabbitMQ ended the connection, or took no messages.", f"{type(reason).__name__}: {reason}", _NEXT)


def kill_and_start(broker: Broker) -> None:
    """Kills the node, and starts it again on its data, even where the kill failed. Raises BrokerError."""
    try:
        broker.kill()
    finally:
        broker.start()


def take_out(channel: Any, queue: str, at_least: int = 0, through: str | None = None) -> Counter:
    """Takes all messages out of the queue, and returns how often each body came. One more message marks the end.

    at_least:  so many different ones are waited for also after the mark, until nothing comes for a while
    through:   the mark goes through this queue, where it expires at once, behind all that expires there
    """
    mark = pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent, expiration="1" if through else None)
    try:
        channel.basic_publish("", through or queue, _LAST, mark, mandatory=True)
    except UnroutableError:                           # the queue itself is gone
        return Counter()
    found, marked = Counter(), False
    for method, _, body in channel.consume(queue, auto_ack=True, inactivity_timeout=ANSWER_S):
        if method is None and not marked:
            raise BrokerError(f"RabbitMQ handed out nothing for {ANSWER_S} s after it was started again.", "it is overloaded", _NEXT)
        if body == _LAST:
            marked = True
        elif method:
            found[body] += 1
        if method is None or marked and len(found) >= at_least:
            break
    channel.cancel()
    return found
