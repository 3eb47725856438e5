"""The lab's own connection to the broker: declare, publish with pipelined confirms, count, take dead letters.

Built on pika's asyncio connection, so that every wait has a deadline, even against a broker that does not answer.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pika
import pika.exceptions
from pika.adapters.asyncio_connection import AsyncioConnection

from labkit.broker.address import Address
from labkit.broker.reach import told
from labkit.errors import BrokerError
from labkit.message import POSITION_HEADER, PUBLISHED_HEADER, Message, copy_of, wire_text

logging.getLogger("pika").setLevel(logging.CRITICAL)  # what goes wrong is told by our own errors
ANSWER_S = 10                                        # for a connection or a channel
_BATCH = 500                                          # messages handed to the socket between two looks at the answers


class Session:
    """One connection. Everything here runs on the event loop that opened it."""

    @classmethod
    async def open(cls, address: Address, answer_s: float = ANSWER_S) -> "Session":
        """Connects. Raises BrokerError when that is refused, or takes too long."""
        session, opened = cls(), asyncio.get_running_loop().create_future()
        session.blocked: str | None = None            # the broker's reason for taking no messages
        session._calls = _Calls()
        session._free: list[Channel] = []
        session.connection = AsyncioConnection(address.parameters(), on_open_callback=lambda _: opened.done() or opened.set_result(None),
                                               on_open_error_callback=lambda _, error: opened.done() or opened.set_exception(told(address, error)),
                                               on_close_callback=lambda _, error: session._calls.end(error))
        session.connection.add_on_connection_blocked_callback(lambda _, frame: session._block(frame.method.reason))
        session.connection.add_on_connection_unblocked_callback(lambda *_: session._block(None))
        await _in_time(opened, answer_s)
        return session

    @property
    def usable(self) -> bool:
        """Tells whether the connection is open."""
        return self.connection.is_open

    async def channel(self, answer_s: float = ANSWER_S) -> "Channel":
        """Returns a channel with publisher confirms: one that an earlier run has given back, or a new one."""
        while self._free:
            if (channel := self._free.pop())._pika.is_open:
                return channel
        channel = Channel(self)
        channel._pika = await _in_time(self._calls.make(lambda done: self.connection.channel(on_open_callback=done)), answer_s)
        channel._pika.add_on_close_callback(lambda _, error: channel._end(error))
        channel._pika.add_on_return_callback(channel._returned)
        channel._pika.add_callback(lambda _: channel._on_empty(None), [pika.spec.Basic.GetEmpty], one_shot=False)
        await _in_time(channel._calls.make(lambda done: channel._pika.confirm_delivery(channel._confirmed, callback=done)), answer_s)
        return channel

    def close(self) -> None:
        """Ends the connection, without waiting for the broker's farewell."""
        if self.connection.is_open:
            self.connection.close()

    def _block(self, reason: str | bytes | None) -> None:
        self.blocked = reason.decode() if isinstance(reason, bytes) else reason


class Channel:
    """One channel: what a single run needs of the broker."""

    def __init__(self, session: Session):
        self._session, self._pika, self._calls = session, None, _Calls()
        self.on_end: Callable[[BrokerError], None] = lambda error: None
        self._sequence, self._pending, self._settled = 0, {}, asyncio.Event()
        self._on_outcome: Callable[[int, str], None] = lambda position, outcome: None
        self._on_empty: Callable[[None], None] = lambda _: None

    @property
    def blocked(self) -> str | None:
        """The broker's reason for taking no messages now, or None."""
        return self._session.blocked

    async def open_another(self) -> "Channel":
        """Returns another channel of the same connection. Raises BrokerError."""
        return await self._session.channel()

    async def declare(self, queues: dict[str, dict[str, Any]]) -> None:
        """Declares durable queues, name -> arguments, in this order. When this returns they are there."""
        *others, last = queues.items()                # only the last asks for an answer: pika holds back the next request until one came
        for queue, arguments in others:
            self._calls.send(lambda: self._pika.queue_declare(queue, durable=True, arguments=arguments))
        await self._calls.make(lambda done: self._pika.queue_declare(last[0], durable=True, arguments=last[1], callback=done))

    async def count(self, queue: str) -> tuple[int, int]:
        """Returns (ready messages, consumers). Ready is only to be trusted when there are no consumers."""
        frame = await self._calls.make(lambda done: self._pika.queue_declare(queue, passive=True, callback=done))
        return frame.method.message_count, frame.method.consumer_count

    async def publish(self, queue: str, messages: Sequence[tuple[int, Message]], on_outcome: Callable[[int, str], None]) -> None:
        """Publishes (position, message) pairs, persistent and mandatory, and returns when each has its outcome.

        on_outcome(position, "confirmed" | "nacked" | "returned") is called for each.
        """
        self._on_outcome = on_outcome
        for start in range(0, len(messages), _BATCH):
            for position, message in messages[start:start + _BATCH]:
                self._sequence += 1
                self._pending[self._sequence] = position
                self._calls.send(lambda: self._pika.basic_publish("", queue, message.body(), pika.BasicProperties(
                    content_type="application/json", delivery_mode=pika.DeliveryMode.Persistent, message_id=message.message_id,
                    correlation_id=message.correlation_id, headers={POSITION_HEADER: position, PUBLISHED_HEADER: time.time_ns() // 1_000_000}), mandatory=True))
            while len(self._pending) > (4 * _BATCH if start + _BATCH < len(messages) else 0):
                self._settled.clear()
                self._calls.check()
                await self._settled.wait()

    def consume(self, queue: str, on_message: Callable[[str, dict], None]) -> None:
        """Takes everything that comes into `queue`, without waiting; on_message(message id, headers)."""
        def take(_, __, properties, ___):
            _soon(on_message, wire_text(properties.message_id), properties.headers or {})
        done = self._calls.expect()
        self._calls.send(lambda: self._pika.basic_consume(queue, take, auto_ack=True, callback=done))

    async def drain(self, queue: str, count: int) -> set[tuple[int | None, int]]:
        """Takes `count` messages out of `queue` and returns which copies they are, as `copy_of` does."""
        found: list[tuple[int | None, int]] = []
        arrived = asyncio.Event()

        def take(_, __, properties, ___):
            found.append(copy_of(properties.headers))
            arrived.set()
        if count:
            frame = await self._calls.make(lambda done: self._pika.basic_consume(queue, take, auto_ack=True, callback=done))
            while len(found) < count:
                arrived.clear()
                await arrived.wait()
            await self._calls.make(lambda done: self._pika.basic_cancel(frame.method.consumer_tag, callback=done))
        return set(found)

    async def take_all(self, queue: str, on_message: Callable[[], None] = lambda: None) -> list[Message]:
        """Takes every message out of `queue`, to which nobody publishes any more, and returns them in their order; on_message() at each."""
        found: list[Message] = []
        while True:                                   # asked of the queue itself, since its length is told late
            answer = await self._calls.make(lambda done: self._get(queue, done))
            if answer is None:
                return found
            found.append(Message.from_any(*answer))
            on_message()

    def _get(self, queue: str, done: Callable[[Any], None]) -> None:
        """Asks for one message: done((body, message id, correlation id)), or done(None) when there is none."""
        self._on_empty = done
        self._pika.basic_get(queue, lambda _, __, properties, body: done((body, properties.message_id, properties.correlation_id)), auto_ack=True)

    def give_back(self, *queues: str) -> None:
        """Removes the queues, without waiting, and lets a later run have the channel."""
        if not self._pika.is_open:
            return
        for queue in queues:
            self._calls.send(lambda: self._pika.queue_delete(queue))
        self.on_end = lambda error: None
        if self._pending or self._calls.unanswered:   # a later run would take the answer for its own, or publish before it may declare
            self._pika.close()
        else:
            self._session._free.append(self)

    def _confirmed(self, frame) -> None:
        last, outcome = frame.method.delivery_tag, "confirmed" if isinstance(frame.method, pika.spec.Basic.Ack) else "nacked"
        while self._pending and (tag := next(iter(self._pending)) if frame.method.multiple else last) <= last:
            if (position := self._pending.pop(tag, None)) is not None:
                _soon(self._on_outcome, position, outcome)
            if not frame.method.multiple:
                break
        self._settled.set()

    def _returned(self, _, __, properties, ___) -> None:
        position = (properties.headers or {}).get(POSITION_HEADER)
        self._pending = {tag: p for tag, p in self._pending.items() if p != position}
        _soon(self._on_outcome, position, "returned")

    def _end(self, error: BaseException) -> None:
        self._calls.end(error)
        self._settled.set()
        if not isinstance(error, (pika.exceptions.ChannelClosedByClient, pika.exceptions.ConnectionClosedByClient)):
            self.on_end(_lost(error))


class _Calls:
    """The requests under way on a connection or channel, which fail when it ends."""

    def __init__(self):
        self._waiting: set[asyncio.Future] = set()
        self._ended: BaseException | None = None
        self.unanswered = 0                           # answers that may still come, and that nobody waits for

    async def make(self, send: Callable[[Callable], Any]) -> Any:
        """Sends a request with a callback for its answer, and returns the answer."""
        self.check()
        answer = asyncio.get_running_loop().create_future()
        self._waiting.add(answer)
        try:
            send(lambda frame: answer.done() or answer.set_result(frame))
            return await answer
        except pika.exceptions.AMQPError as error:
            raise _lost(error) from None
        except asyncio.CancelledError:
            self.unanswered += 1
            raise
        finally:
            self._waiting.discard(answer)

    def expect(self) -> Callable[[Any], None]:
        """Returns a callback for the answer to a request that is not waited for."""
        def answered(_) -> None:
            self.unanswered -= 1
        self.unanswered += 1
        return answered

    def send(self, send: Callable[[], Any]) -> None:
        """Sends a request that has no answer."""
        self.check()
        try:
            send()
        except pika.exceptions.AMQPError as error:
            raise _lost(error) from None

    def check(self) -> None:
        """Raises BrokerError when the connection or channel has ended."""
        if self._ended is not None:
            raise _lost(self._ended)

    def end(self, error: BaseException) -> None:
        self._ended = error
        for answer in self._waiting:
            answer.done() or answer.set_exception(_lost(error))


def _soon(callback: Callable, *arguments: Any) -> None:
    """Calls back outside of pika, which would take an error of the callback for one of the connection."""
    asyncio.get_running_loop().call_soon(callback, *arguments)


async def _in_time(answer: Awaitable, seconds: float = ANSWER_S) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise BrokerError(f"RabbitMQ did not answer within {seconds:g} s.", "it is frozen, or overloaded", "Run `python3 -m labkit doctor`.") from None


def _lost(error: BaseException | None) -> BrokerError:
    return BrokerError("The connection to RabbitMQ ended.", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
                       "Run `python3 -m labkit doctor`, then run the cell again.")
