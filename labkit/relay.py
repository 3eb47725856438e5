"""The TCP relay: stands between a worker and the broker, and loses exactly one ack, publish or confirm where it is told to.

It passes every frame on until it is armed with a connection, by the worker's port, a channel and a delivery tag. The worker's ack of
that tag, the message that has that number on the channel, or the broker's confirm of it, is then dropped with everything behind it,
and the connection is cut. Its log says what it read and dropped.
"""

import asyncio
import struct
from collections import Counter
from collections.abc import Callable

_FRAME = struct.Struct(">BHI")                        # type, channel, payload size; an end byte follows the payload
_METHOD, _BASIC_ACK, _BASIC_PUBLISH = 1, bytes((0, 60, 0, 80)), bytes((0, 60, 0, 40))
_TAG = struct.Struct(">QB")                           # delivery tag, multiple
_BODY_SIZE = struct.Struct(">4xQ")                    # in the header of a message, behind its class and weight
_PROTOCOL_HEADER = 8
ACK, PUBLISH, CONFIRM = "ack", "publish", "confirm"   # an ack and a confirm are one method, by who sends it


class Relay:
    """One relay a run; every connection through it is watched."""

    def __init__(self, host: str, port: int):
        self._target, self._server, self._passages = (host, port), None, []
        self.log: list[str] = []
        self._armed: dict[tuple[int, int], tuple[str, int, Callable[[], None]]] = {}          # by the worker's port and the channel

    async def start(self) -> dict[str, object]:
        """Listens on a free loopback port and returns it as {"host": …, "port": …}."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return {"host": host, "port": port}

    def arm(self, what: str, port: int, channel: int, tag: int, on_drop: Callable[[], None]) -> None:
        """Loses the ack or confirm of this delivery tag on this channel of the connection from this port, or the message with this number; then on_drop()."""
        self._armed[port, channel] = (what, tag, on_drop)
        self.log.append(f"armed: {what}, channel {channel}, tag {tag}")

    async def close(self) -> None:
        """Cuts every connection and stops listening."""
        self._server.close()
        for writer in self._passages:
            writer.close()

    async def _serve(self, worker_in: asyncio.StreamReader, worker_out: asyncio.StreamWriter) -> None:
        try:
            broker_in, broker_out = await asyncio.open_connection(*self._target)
        except OSError:
            worker_out.close()
            return
        self._passages += [worker_out, broker_out]
        port = worker_out.get_extra_info("peername")[1]
        there = asyncio.ensure_future(self._forward(worker_in, broker_out, port, from_worker=True))
        back = asyncio.ensure_future(self._forward(broker_in, worker_out, port, from_worker=False))
        await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        broker_out.close()                            # the broker sees the end of the connection, and nothing of what was dropped
        await asyncio.wait([back], timeout=1)         # what the broker still says reaches the worker; then it is cut
        worker_out.close()
        there.cancel()
        back.cancel()

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, port: int, from_worker: bool) -> None:
        """Passes frames on, until an end comes or the armed one is dropped."""
        published = Counter()                         # messages, by channel
        try:
            if from_worker:
                target.write(await source.readexactly(_PROTOCOL_HEADER))
            while True:
                head = await source.readexactly(_FRAME.size)
                kind, channel, size = _FRAME.unpack(head)
                payload = await source.readexactly(size + 1)
                what, tag, multiple = "", 0, False
                if kind == _METHOD and payload[:4] == _BASIC_ACK:
                    what, (tag, multiple) = ACK if from_worker else CONFIRM, _TAG.unpack_from(payload, 4)
                elif kind == _METHOD and payload[:4] == _BASIC_PUBLISH:
                    published[channel] += 1
                    what, tag = PUBLISH, published[channel]
                if on_drop := self._take_armed(what, port, channel, tag, multiple):
                    method = f"publish, channel {channel}, number {tag}" if what == PUBLISH else f"ack, channel {channel}, tag {tag}"
                    self.log.append(f"dropped: basic.{method}; connection cut")
                    if what == PUBLISH:
                        await self._swallow(source)
                    asyncio.get_running_loop().call_soon(on_drop)            # whose errors are not the stream's
                    return
                target.write(head + payload)
                await target.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    def _take_armed(self, what: str, port: int, channel: int, tag: int, multiple: bool) -> Callable[[], None] | None:
        armed, number, on_drop = self._armed.get((port, channel), ("", 0, None))
        if not what or what != armed or not (tag == number or what == CONFIRM and multiple and tag > number):
            return None
        del self._armed[port, channel]
        return on_drop

    async def _swallow(self, source: asyncio.StreamReader) -> None:
        """Reads the rest of a message, so that it has left the worker when the connection is cut."""
        left = None
        while left is None or left > 0:
            _, _, size = _FRAME.unpack(await source.readexactly(_FRAME.size))
            payload = await source.readexactly(size + 1)
            left = _BODY_SIZE.unpack_from(payload)[0] if left is None else left - size
