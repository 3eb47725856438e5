"""Every queue name, every declaration, and the one way to connect. Pure functions; nothing here remembers anything."""

from dataclasses import fields
from typing import Any

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException

from labkit.broker.address import Address

#: pika's ways to say that a channel or a connection is no longer there
BROKEN = (pika.exceptions.AMQPConnectionError, pika.exceptions.AMQPChannelError)
#: a queue of a run is removed by its run; on a broker that outlives the kernel, this removes what a killed kernel left
EXPIRES_MS = 30 * 60 * 1000
#: far above any `max_deliveries`: with a limit, a quorum queue returns messages to its front on every version
FAR_LIMIT = 1000


def wire(address: Address) -> dict[str, Any]:
    """Returns an address as JSON values, for the private line to a worker."""
    return {field.name: getattr(address, field.name) for field in fields(address)}


def connect(address: dict[str, Any], **overrides: Any) -> pika.BlockingConnection:
    """Connects to the broker, by an address as `wire` gives it, with pika's parameters of a connection. Raises pika's AMQPConnectionError, and no other."""
    try:
        return pika.BlockingConnection(Address(**address).parameters(**overrides))
    except (AMQPConnectorException, OSError) as error:                        # a broker that does not answer, a name or a certificate
        raise pika.exceptions.AMQPConnectionError(repr(error)) from None


def port_of(connection: pika.BlockingConnection) -> int | None:
    """Returns the port that a connection comes from; None when it has ended."""
    try:
        return connection._impl._transport._sock.getsockname()[1]
    except (AttributeError, OSError):
        return None


def work_queue(prefix: str, run: int) -> str:
    """Returns the name of a run's work queue."""
    return f"{prefix}.{run}.work"


def dead_queue(prefix: str, run: int) -> str:
    """Returns the name of a run's dead-letter queue."""
    return f"{prefix}.{run}.dead"


def events_queue(prefix: str, run: int) -> str:
    """Returns the name of the queue that a run's handlers or producers publish to."""
    return f"{prefix}.{run}.events"


def delay_queue(prefix: str, run: int, delay_ms: int) -> str:
    """Returns the name of the queue in which a run's messages wait for so long."""
    return f"{prefix}.{run}.delay-{delay_ms}"


def own_queue(prefix: str, word: str) -> str:
    """Returns a name for a queue that a learner declares in plain pika."""
    return f"{prefix}.own.{word}"


def survival_queue(prefix: str, run: int, number: int) -> str:
    """Returns the name of a queue that is looked at before and after a kill of the broker."""
    return f"{prefix}.{run}.survival-{number}"


def expiry_queue(prefix: str, run: int, number: int) -> str:
    """Returns the name of a delay queue that is watched while it expires."""
    return f"{prefix}.{run}.expiry-{number}"


def expired_queue(prefix: str, run: int, number: int) -> str:
    """Returns the name of the queue that what expired arrives in."""
    return f"{prefix}.{run}.expired-{number}"


def work_arguments(queue_type: str, dead: str | None, delivery_limit: int | None) -> dict[str, Any]:
    """Returns the arguments of a work queue; the default exchange routes to `dead`, the queue of that name."""
    arguments: dict[str, Any] = {"x-queue-type": queue_type, "x-expires": EXPIRES_MS}
    if dead:
        arguments |= {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    if queue_type == "quorum":
        arguments["x-delivery-limit"] = FAR_LIMIT if delivery_limit is None else delivery_limit
    return arguments


def events_arguments(max_length: int | None = None) -> dict[str, Any]:
    """Returns the arguments of a queue of events, which refuses what is more than `max_length`: a nack instead of a confirm."""
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-expires": EXPIRES_MS, "x-delivery-limit": FAR_LIMIT}
    return arguments if max_length is None else {**arguments, "x-max-length": max_length, "x-overflow": "reject-publish"}


def dead_arguments() -> dict[str, Any]:
    """Returns the arguments of a dead-letter queue: it keeps, and nothing takes out of it by itself."""
    return {"x-queue-type": "classic", "x-expires": EXPIRES_MS}


def survival_arguments(queue_type: str) -> dict[str, Any]:
    """Returns the arguments of a queue that is looked at before and after a kill of the broker: it drops nothing by itself."""
    return {"x-queue-type": queue_type, "x-expires": EXPIRES_MS}


def expired_arguments() -> dict[str, Any]:
    """Returns the arguments of a queue that what expired arrives in: it drops nothing by itself."""
    return {"x-queue-type": "quorum", "x-expires": EXPIRES_MS, "x-delivery-limit": FAR_LIMIT}


def delay_arguments(target: str, delay_ms: int | None, queue_type: str = "quorum", at_least_once: bool = True) -> dict[str, Any]:
    """Returns the arguments of a queue that nobody consumes from: after the delay the broker moves each message to the queue `target`.

    One queue a delay, since messages expire at the head of a queue only. None: each message brings its own delay, to show why.
    """
    arguments: dict[str, Any] = {"x-queue-type": queue_type, "x-expires": EXPIRES_MS + (delay_ms or 0), "x-dead-letter-exchange": "",
                                 "x-dead-letter-routing-key": target}
    if delay_ms is not None:
        arguments["x-message-ttl"] = delay_ms + 1     # the broker counts whole milliseconds, and a message is never to be early
    if at_least_once:                                 # a broker that is killed meanwhile loses nothing, and may deliver twice
        arguments |= {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    return arguments
