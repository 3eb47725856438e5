"""The delivery: one handing-over of a message to a handler, and what can be done with it: an answer, another try later, or a person."""

import time
from collections.abc import Mapping
from typing import Any

import pika.exceptions

from labkit import steps
from labkit.account import MAY_COME
from labkit.errors import HandlerError
from labkit.message import PUBLISHED_HEADER, Message, copy_of, retries_of
from labkit.retry import LONGEST_MS, TEMPORARY
from labkit.routes import Routes
from labkit.table import plain
from labkit.topology import BROKEN

_MAX_REASON = 500                                     # characters: reasons travel along, and the header of a message has to fit into one frame


class Delivery:
    """What a handler is given.

    message:      the logical message
    tag:          the broker's number for this delivery, valid on `channel` only
    redelivered:  the broker's hint that it handed this message out before
    attempt:      1 for the first handing-over of this message, from the ledger's delivery log
    retries:      the retries that led here, the earliest first, from labkit's header: {"attempt": 1, "reason": "TimeoutError", "delay_ms": 100} each
    age_ms:       milliseconds since the message was published for the first time; 0 where nobody wrote that down
    channel:      pika's own channel, for what labkit does not wrap
    """

    def __init__(self, number: int, message: Message, tag: int, redelivered: bool, channel: Any, gate: steps.Gate, settled: bool,
                 body: bytes, headers: Mapping[str, Any], routes: Routes):
        self.number, self.message = number, message
        self.tag, self.redelivered, self.channel, self.attempt = tag, redelivered, channel, None
        self.body, self.headers, self.retries = body, headers, retries_of(headers)
        self.position, self.copy = copy_of(headers)   # the place among the published messages, and which copy of it
        self.settled = settled                        # an automatic acknowledgement settled it when it was sent
        self.fence_next = False                       # set by the supervisor's answer: find out what became of the ack
        self._gate, self._routes, self._published_again = gate, routes, False

    def __repr__(self):
        return f"<Delivery of {self.message.message_id}, attempt {self.attempt}, tag {self.tag}>"

    @property
    def age_ms(self) -> int:
        published = self.headers.get(PUBLISHED_HEADER)
        return max(0, time.time_ns() // 1_000_000 - published) if isinstance(published, int) else 0

    def ack(self, multiple: bool = False) -> str:
        """Tells the broker that this delivery (and with `multiple` each earlier one on the channel) is done with.

        Returns "sent"; "handled" where a round trip showed that the broker took it; "unknown" when the connection
        broke, so that it may or may not have arrived; "refused" when the broker closed the channel over it.
        """
        return self._answer(steps.ACK, self.channel.basic_ack, **{"multiple": True} if multiple else {})

    def nack(self, requeue: bool = True) -> str:
        """Tells the broker that handling failed. Returns as `ack` does."""
        return self._answer(steps.NACK, self.channel.basic_nack, requeue=requeue)

    def reject(self, requeue: bool = False) -> str:
        """Refuses the delivery: to the dead-letter exchange if there is one, else dropped. Returns as `ack` does."""
        return self._answer(steps.REJECT, self.channel.basic_reject, requeue=requeue)

    def republish(self, delay_ms: int, reason: str = "") -> str:
        """Publishes the message again, to come back after the delay, and leaves this delivery as it is: unanswered, if it was so.

        The broker keeps it meanwhile, in a queue for this delay. Returns as `shop.publish` does: only "confirmed" means that the
        broker has it. Raises HandlerError for a second time: two copies would come back.
        """
        if not isinstance(delay_ms, int) or isinstance(delay_ms, bool) or not 0 < delay_ms <= LONGEST_MS:
            raise HandlerError(f"delay_ms is {delay_ms!r}.", f"it must be a whole number from 1 to {LONGEST_MS}", "Write delivery.republish(100).")
        if self._published_again:
            raise HandlerError("This delivery was published again already.", "two copies of it would come back", "Publish again once, then ack.")
        reason = plain(reason, _MAX_REASON)
        with self._gate.step(steps.RETRY_PUBLISH, self, delay_ms=delay_ms, reason=reason) as passage:
            passage.outcome = self._routes.again(self, delay_ms, reason)
            self._published_again = passage.outcome in MAY_COME
        return passage.outcome

    def retry(self, reason: str = "", *, at_least_ms: int = 0) -> str:
        """Has the message tried again after the delay that the run's policy gives, or puts it before a person when its budget is used up.

        at_least_ms: no sooner than that, such as what a Retry-After says
        Publishes first and acks then. Returns "retried"; "parked"; or "given back" when the broker did not confirm the message: it is
        then given back instead, and comes at once. Raises HandlerError in a run without a policy.
        """
        if self._routes.policy is None:
            raise HandlerError("This run has no retry policy.", "delivery.retry asks it for the delay",
                               "Write lab.run(…, retry=RetryPolicy()), or name the delay: delivery.republish(100), then delivery.ack().")
        if not isinstance(at_least_ms, int) or isinstance(at_least_ms, bool):
            raise HandlerError(f"at_least_ms is {at_least_ms!r}.", "it must be a whole number", "Write delivery.retry(reason, at_least_ms=1000).")
        return self._routes.follow(self, TEMPORARY, reason, at_least_ms)

    def park(self, reason: str, required_check: str = "", route: str = "manual-review", owner: str | None = None) -> str:
        """Writes a terminal record, which a person decides on, then acks: the message leaves the automatic route.

        required_check: what must be found out first; owner: who decides. Returns as `ack` does. Raises LedgerError when the record
        cannot be written; the delivery is then not acked.
        """
        reason = plain(reason, _MAX_REASON)
        with self._gate.step(steps.TERMINAL_RECORD, self, route=route, reason=reason) as passage:
            passage.outcome = self._routes.record(self, reason, required_check, route, owner)
        return self.ack()

    def fence(self) -> None:
        """Makes a round trip on the channel: the broker has then handled everything sent before. Raises pika's errors."""
        self.channel.basic_qos(prefetch_count=0)      # says nothing to a consumer that is there already
        self._gate.note("fenced", self)

    def _answer(self, name: str, send, **arguments: Any) -> str:
        again, self.settled = self.settled, True
        with self._gate.step(name, self, **arguments) as passage:
            try:
                send(self.tag, **arguments)
                passage.outcome = "sent"
                if again or self.fence_next or self._gate.watches(name, steps.AFTER):
                    self.fence()
                    passage.outcome = "handled"
            except pika.exceptions.ChannelClosedByBroker:
                passage.outcome = "refused"
            except BROKEN:
                passage.outcome = "unknown"
            self.fence_next = False
        return passage.outcome
