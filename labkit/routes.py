"""The routes that lead out of a handler beside an answer: back to it after a delay, kept by the broker; to a person; or on as an event."""

from collections.abc import Callable
from typing import Any

from labkit.message import POSITION_HEADER, PUBLISHED_HEADER, RETRIES_HEADER, Message
from labkit.retry import Publish, Retry, RetryPolicy
from labkit.sender import Sender

#: kind of failure -> what a person finds out first
_CHECKS = {"temporary": "did the effect happen at one of the attempts?", "terminal": "what is wrong with the input?",
           "unknown": "what is this error, and did the effect happen?", "defer": "is what it waits for late, or lost?"}


class Routes:
    """`follow` does what the policy says (None where the run has no policy); `again` and `record` are its two ways."""

    def __init__(self, policy: RetryPolicy | None, shop: Any, sender: Sender, delay_queue: Callable[[int], str]):
        """delay_queue(delay_ms) returns the name of the queue for this delay, which is there by then."""
        self.policy, self._shop, self._sender, self._delay_queue = policy, shop, sender, delay_queue
        self.record = shop.terminal.record

    def follow(self, delivery: Any, kind: str, reason: str, at_least_ms: int = 0) -> str:
        """Does with a delivery what the policy makes of a failure of this kind, and settles it.

        Returns "retried"; "given back" when the broker did not confirm the copy, so that the delivery comes again at once; "parked"; or
        "answered". Raises LedgerError when the ledger is needed for it and away: the delivery is then not settled.
        """
        action = self.policy.next_action(kind, delivery.attempt, delivery.age_ms, delivery.message.message_id, at_least_ms)
        match action:
            case Retry(delay_ms) if delivery.republish(delay_ms, reason) == "confirmed":
                delivery.ack()
                return "retried"
            case Retry():
                delivery.nack(requeue=True)
                return "given back"
            case Publish():
                self._answer(delivery, reason)
                return "answered"
            case _:                                   # nobody knows what a deferred one waits for, so that is for a person, too
                delivery.park(reason, _CHECKS[kind], getattr(action, "route", self.policy.routes.get(kind)))
                return "parked"

    def again(self, delivery: Any, delay_ms: int, reason: str) -> str:
        """Publishes what was delivered into the queue of this delay, with its retries in the header, and returns the outcome."""
        retries = [*delivery.retries, {"attempt": delivery.attempt, "reason": reason, "delay_ms": delay_ms}]
        headers = {name: delivery.headers[name] for name in (POSITION_HEADER, PUBLISHED_HEADER) if isinstance(delivery.headers.get(name), int)}
        return self._sender.put(self._delay_queue(delay_ms), delivery.body, {**headers, RETRIES_HEADER: retries}, delivery.message)

    def _answer(self, delivery: Any, outcome: str) -> None:
        """Records the answer as the effect, and puts its event into the outbox, in one transaction; then acks."""
        message, shop = delivery.message, self._shop
        with shop.ledger.transaction():
            if shop.ledger.record_once(message.effect_key, outcome=outcome) == "recorded":
                shop.outbox.add(Message(message.effect_key, f"{message.message_id}:answer", schema="answer.v1", payload={"outcome": outcome},
                                        correlation_id=message.correlation_id))
        delivery.ack()
