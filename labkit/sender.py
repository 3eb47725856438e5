"""The sender: publishes from a worker or a producer on a connection of its own, and tells what became of each message.

Sending and hearing are two steps, because a process can die between them. The connection is another one than the
deliveries come on: when it is lost, no delivery goes back.
"""

import time
from collections.abc import Callable
from typing import Any

import pika

from labkit import steps
from labkit.access import text
from labkit.errors import HandlerError
from labkit.message import Message, expect
from labkit.topology import BROKEN, port_of

CONFIRM_S = 10                                        # how long a confirm is waited for
_MAX_NAME_BYTES = 255                                 # what AMQP gives to a queue's name


class Sender:
    """`publish` sends a message; `confirm` waits for the outcomes of what was sent.

    The outcomes: "confirmed"; "nacked", by a queue that is full; "returned", because no queue has that name; "blocked", while the
    broker takes no messages; "unknown", when the connection ended before the confirm came; "not sent", when there was none.
    """

    def __init__(self, connect: Callable[[], Any], gate: steps.Gate, current_delivery: Callable[[], Any], queue: str, arguments: dict[str, Any]):
        """connect() returns a blocking connection; queue: where messages go that name no other, and the arguments that it is declared with."""
        self._connect, self._gate, self._delivery, self._queue, self._arguments = connect, gate, current_delivery, queue, arguments
        self._connection = self._channel = self._blocked = None
        self._provided = False                        # the queue, on this connection
        self._pending: dict[int, Message] = {}        # by their number on the channel, of those that have no outcome yet
        self._outcomes: dict[str, str] = {}           # by message id, of those that were not told yet
        self._returned: set[str] = set()
        self.sent = 0                                 # messages, on this channel
        self.passes = 0                               # of the step, ever
        self.settle_next = False                      # the next message, or its confirm, is to be lost: nothing else with it

    def publish(self, message: Message, to: str | None = None, mandatory: bool = True) -> str:
        """Sends a message, persistent. Returns "sent", or "not sent"."""
        expect("shop.publish", message)
        if len(text("The queue's name", "" if to is None else to).encode()) > _MAX_NAME_BYTES:
            raise HandlerError(f"The queue's name is longer than {_MAX_NAME_BYTES} bytes.", f"it begins with {to[:40]!r}", "Use a shorter one.")
        body = message.body()                         # which raises here, before the message has a number
        self.passes += 1
        self._reach()
        self._provide()
        with self._step(steps.PUBLISH, message, **({"to": to} if to else {}), **({} if mandatory else {"mandatory": False})) as passage:
            passage.outcome = "not sent"
            self._outcomes[message.message_id] = "not sent"
            if self.settle_next:
                self._settle()
            if self._usable:
                try:
                    passage.outcome = "sent"          # even if the connection ends here: it may have arrived, or not
                    self._send(to or self._queue, body, message, mandatory)
                    if self.settle_next:
                        self._settle()
                    if self._gate.watches(steps.PUBLISH, steps.AFTER):
                        self.fence()
                        passage.outcome = self._blocked or "sent"             # for the trace of one that is killed before it asks
                except BROKEN:
                    self._lose()
            self.settle_next = False
        return "not sent" if passage.outcome == "not sent" else "sent"

    def put(self, queue: str, body: bytes, headers: dict[str, Any], message: Message) -> str:
        """Puts a message that was delivered into another queue, and returns the outcome. No step of its own."""
        self._reach()
        if not self._usable:
            return "not sent"
        try:
            self._send(queue, body, message, mandatory=True, headers=headers)
        except BROKEN:
            self._lose()
        self._settle()
        self._pending.pop(self.sent, None)
        return self._outcomes.pop(message.message_id, self._blocked or "unknown")

    def confirm(self, message: Message | None = None) -> dict[str, str]:
        """Waits for the outcomes of all that was sent, and returns those that were not told yet: message id -> outcome; or this message's only."""
        with self._step(steps.CONFIRM, message) as passage:
            self._settle()
            self._outcomes |= {sent.message_id: self._blocked or "unknown" for sent in self._pending.values()}
            self._pending.clear()
            self._returned.clear()                    # what comes later tells of no message that is still waited for
            if message:
                passage.outcome = self._outcomes.pop(message.message_id)
                return {message.message_id: passage.outcome}
            outcomes, self._outcomes = self._outcomes, {}
            passage.outcome = _summed(outcomes)
        return outcomes

    def fence(self) -> None:
        """Waits until the broker has everything that was sent, if there is a connection.

        A round trip would not do: a quorum queue that is new may still have to be told of the message when the channel ends.
        """
        if self._usable:
            self._settle()

    @property
    def next(self) -> tuple[int, int, int] | None:
        """The port of the connection, the channel's number, and the number that the next message has on it; None without a connection."""
        return (port_of(self._connection), self._channel.channel_number, self.sent + 1) if self._usable else None

    def close(self) -> None:
        """Ends the connection, once the broker has handled what was sent; one that is blocked ends with the process."""
        try:
            self.fence()
            if self._usable and not self._blocked:
                self._connection.close()
        except BROKEN:
            pass

    @property
    def _usable(self) -> bool:
        return self._channel is not None and self._channel.is_open

    def _reach(self) -> None:
        """Opens the connection where there is none, with confirms that are heard of one by one."""
        if self._usable:
            return
        self._lose()
        try:
            self._connection = self._connect()
            self._channel = self._connection.channel()
            self._channel._impl.confirm_delivery(self._hear)                  # pika's blocking channel would wait inside basic_publish
        except BROKEN:
            self._channel = None
            return
        self._channel._impl.add_on_return_callback(lambda _, __, properties, ___: self._returned.add(properties.message_id))
        self._connection.add_on_connection_blocked_callback(lambda *_: setattr(self, "_blocked", "blocked"))
        self._connection.add_on_connection_unblocked_callback(lambda *_: setattr(self, "_blocked", None))
        self.sent, self._blocked, self._provided = 0, None, False

    def _provide(self) -> None:
        """Declares the queue for what names no other, once a connection; a broker that is blocked would not answer."""
        if self._usable and not self._provided and not self._blocked:
            try:
                self._channel.queue_declare(self._queue, durable=True, arguments=self._arguments)
                self._provided = True
            except BROKEN:
                self._lose()

    def _send(self, queue: str, body: bytes, message: Message, mandatory: bool, headers: dict[str, Any] | None = None) -> None:
        self.sent += 1
        self._pending[self.sent] = message
        try:
            self._channel.basic_publish("", queue, body, pika.BasicProperties(
                content_type="application/json", delivery_mode=pika.DeliveryMode.Persistent, message_id=message.message_id,
                correlation_id=message.correlation_id, headers=headers), mandatory=mandatory)
        except BROKEN:
            raise
        except Exception:                             # it cannot be written down for the broker, who gives this number to the next one
            del self._pending[self.sent]
            self.sent -= 1
            raise

    def _settle(self) -> None:
        """Waits for the outcomes of all that was sent, as long as they may come."""
        end = time.monotonic() + CONFIRM_S
        while self._pending and not self._blocked and (left := end - time.monotonic()) > 0:
            try:
                self._connection.process_data_events(time_limit=left)
            except BROKEN:
                self._lose()

    def _lose(self) -> None:
        self._outcomes |= {message.message_id: "unknown" for message in self._pending.values()}
        self._pending.clear()
        self._returned.clear()
        self._connection = self._channel = None

    def _hear(self, frame: Any) -> None:
        last, outcome = frame.method.delivery_tag, "confirmed" if isinstance(frame.method, pika.spec.Basic.Ack) else "nacked"
        for number in [number for number in self._pending if number == last or frame.method.multiple and number < last]:
            message_id = self._pending.pop(number).message_id
            self._outcomes[message_id] = "returned" if message_id in self._returned else outcome
            self._returned.discard(message_id)
        if not self._pending:
            self._connection.add_callback_threadsafe(lambda: None)            # ends the wait for events

    def _step(self, name: str, message: Message | None, **detail: Any) -> steps.Passage:
        about = {"event_id": message.message_id, "effect_key": message.effect_key} if message else {}
        return self._gate.step(name, self._delivery(), **about, **detail)


def _summed(outcomes: dict[str, str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome in dict.fromkeys(outcomes.values()) if (count := list(outcomes.values()).count(outcome)))
