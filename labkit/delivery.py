"""The delivery: one handing-over of a message to a handler, and the answers that can be given to it."""

from typing import Any

import pika.exceptions

from labkit import steps
from labkit.message import Message

#: pika's ways to say that a channel or a connection is no longer there
BROKEN = (pika.exceptions.AMQPConnectionError, pika.exceptions.AMQPChannelError)


class Delivery:
    """What a handler is given.

    message:      the logical message
    tag:          the broker's number for this delivery, valid on `channel` only
    redelivered:  the broker's hint that it handed this message out before
    attempt:      1 for the first handing-over of this message, from the ledger's delivery log
    channel:      pika's own channel, for what labkit does not wrap
    """

    def __init__(self, number: int, message: Message, position: int | None, tag: int, redelivered: bool, channel: Any,
                 gate: steps.Gate, settled: bool):
        self.number, self.message, self.position = number, message, position
        self.tag, self.redelivered, self.channel, self.attempt = tag, redelivered, channel, None
        self.settled = settled                        # an automatic acknowledgement settled it when it was sent
        self.fence_next = False                       # set by the supervisor's answer: find out what became of the ack
        self._gate = gate

    def __repr__(self):
        return f"<Delivery of {self.message.message_id}, attempt {self.attempt}, tag {self.tag}>"

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
