"""The check of a topology: where could a message be lost in it without a word? Pure; it looks at declarations, and asks no broker.

RabbitMQ takes each of these declarations as it is, and later drops messages of which nobody hears.
"""

from collections.abc import Mapping
from typing import Any

from labkit.errors import PlanError

_ALWAYS = "at-least-once"
_EXCHANGE, _KEY = "x-dead-letter-exchange", "x-dead-letter-routing-key"
_OVERFLOW, _STRATEGY, _TTL, _TYPE = "x-overflow", "x-dead-letter-strategy", "x-message-ttl", "x-queue-type"


def check_topology(queues: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises PlanError for the first place at which a message could be lost in silence.

    queues: name -> arguments as in pika's queue_declare, all the queues that dead letters may go to; they travel by the default exchange
    """
    if not isinstance(queues, Mapping):
        raise PlanError(f"queues is {queues!r}.", "a dictionary is expected: the name of each queue, and its arguments", 'Write check_topology({"work": {"x-queue-type": "quorum"}}).')
    queues = {name: arguments or {} for name, arguments in queues.items()}
    for name, arguments in queues.items():
        _check_that_what_leaves_goes_somewhere(name, arguments)
        _check_that_at_least_once_is_at_work(name, arguments)
        _check_that_the_route_ends_in_a_queue(name, arguments, queues)
    _check_that_no_message_comes_round(queues)


def _check_that_what_leaves_goes_somewhere(name: str, arguments: Mapping[str, Any]) -> None:
    if (why := _expires(arguments) or _drops(arguments)) and _EXCHANGE not in arguments:
        raise PlanError(f"The queue {name!r} loses messages: it {why}, and has no dead-letter exchange.", "what leaves such a queue by itself is dropped",
                        f'Give it {{"{_EXCHANGE}": "", "{_KEY}": …}} with the name of the queue that takes what leaves'
                        + ("." if _expires(arguments) else f', or "{_OVERFLOW}": "reject-publish", so that the publisher hears of it.'))


def _check_that_at_least_once_is_at_work(name: str, arguments: Mapping[str, Any]) -> None:
    if arguments.get(_STRATEGY) != _ALWAYS:
        return
    silent = "and RabbitMQ goes back to at-most-once without a word"
    for wrong, why, now in ((not _is_quorum(arguments), "only quorum queues know it, and RabbitMQ refuses to declare another one so", f'Write "{_TYPE}": "quorum".'),
                            (arguments.get(_OVERFLOW) != "reject-publish", f"it needs reject-publish, as what drops its oldest messages cannot keep them, {silent}",
                             f'Write "{_OVERFLOW}": "reject-publish".'),
                            (_EXCHANGE not in arguments, f"it has no dead-letter exchange, {silent}", f'Give it {{"{_EXCHANGE}": "", "{_KEY}": …}}.')):
        if wrong:
            raise PlanError(f"The queue {name!r} does not dead-letter at least once, although it says so.", why, now)


def _check_that_the_route_ends_in_a_queue(name: str, arguments: Mapping[str, Any], queues: Mapping[str, Any]) -> None:
    if _EXCHANGE not in arguments:
        return
    if arguments[_EXCHANGE] != "":
        raise PlanError(f"The dead letters of {name!r} go to the exchange {arguments[_EXCHANGE]!r}, which this check cannot follow.",
                        "it knows the default exchange, which routes by the name of the queue", f'Write "{_EXCHANGE}": "", and the queue\'s name as "{_KEY}".')
    if (target := _target(name, arguments)) not in queues:
        raise PlanError(f"The dead letters of {name!r} go to {target!r}, and there is no such queue.", "the name is misspelt, or the queue is not declared",
                        "Declare it with the others; these are there: " + ", ".join(map(repr, queues)) + ".")


def _check_that_no_message_comes_round(queues: Mapping[str, Mapping[str, Any]]) -> None:
    """A message may come back to a queue only if somebody rejected it on the way; else RabbitMQ takes it for an endless loop."""
    onward = {name: _target(name, arguments) for name, arguments in queues.items()
              if _EXCHANGE in arguments and (_expires(arguments) or _drops(arguments) or _limits(arguments))}
    for first in onward:
        way = [first]
        while (queue := onward.get(way[-1])) is not None and queue not in way:
            way.append(queue)
        if queue == first:
            told = " → ".join(map(repr, [*way, first]))
            raise PlanError(f"A message can go round without ever being rejected, and RabbitMQ then drops it: {told}.",
                            "; ".join(f"{name!r} {_expires(queues[name]) or _drops(queues[name]) or _limits(queues[name])}" for name in way),
                            "Let one of these queues keep its messages until a consumer takes them, and let the consumer publish the retry, "
                            "or reject with requeue=False.")


def _target(name: str, arguments: Mapping[str, Any]) -> str:
    return arguments.get(_KEY, name)                  # without a key of its own a dead letter keeps the one that brought it here


def _is_quorum(arguments: Mapping[str, Any]) -> bool:
    return arguments.get(_TYPE) == "quorum"


def _expires(arguments: Mapping[str, Any]) -> str:
    return "lets messages expire" if _TTL in arguments else ""


def _drops(arguments: Mapping[str, Any]) -> str:
    """A limit without a word about overflow is drop-head."""
    limited = {"x-max-length", "x-max-length-bytes"} & set(arguments)
    return "drops the oldest when it is full" if limited and arguments.get(_OVERFLOW, "drop-head") == "drop-head" else ""


def _limits(arguments: Mapping[str, Any]) -> str:
    limit = arguments.get("x-delivery-limit")
    return "gives up what was delivered too often" if limit is not None and limit >= 0 else ""
