"""The TCP relay: stands between a worker and the broker, and loses exactly one ack where it is told to.

It passes every byte on until it is armed with a channel and a delivery tag. Then it reads the worker's AMQP frames; the
ack with that tag is dropped with everything behind it, and the connection is cut. Its log says what it read and dropped.
"""

import asyncio
import struct

_FRAME = struct.Struct(">BHI")                        # type, channel, payload size; an end byte follows the payload
_METHOD, _BASIC_ACK = 1, bytes((0, 60, 0, 80))
_PROTOCOL_HEADER = 8


class Relay:
    """One relay a run; each connection through it is a `Passage`, found by the worker's own port."""

    def __init__(self, host: str, port: int):
        self._target, self._server, self._passages = (host, port), None, []
        self.log: list[str] = []
        self._armed: tuple[int, int] | None = None
        self.on_drop = lambda: None

    async def start(self) -> dict[str, object]:
        """Listens on a free loopback port and returns it as {"host": …, "port": …}."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return {"host": host, "port": port}

    def arm(self, channel: int, tag: int) -> None:
        """Loses the next ack of this delivery tag on this channel. One at a time: the worker that asked waits."""
        self._armed = (channel, tag)
        self.log.append(f"armed: channel {channel}, tag {tag}")

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
        back = asyncio.ensure_future(_pump(broker_in, worker_out))
        try:
            await self._forward(worker_in, broker_out)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            broker_out.close()                        # the broker sees the end of the connection, and nothing of the ack
            await asyncio.wait([back], timeout=1)     # what the broker still says reaches the worker; then it is cut
            back.cancel()
            worker_out.close()

    async def _forward(self, worker: asyncio.StreamReader, broker: asyncio.StreamWriter) -> None:
        broker.write(await worker.readexactly(_PROTOCOL_HEADER))
        while True:
            head = await worker.readexactly(_FRAME.size)
            kind, channel, size = _FRAME.unpack(head)
            payload = await worker.readexactly(size + 1)
            if self._armed and kind == _METHOD and payload[:4] == _BASIC_ACK:
                tag, = struct.unpack_from(">Q", payload, 4)
                if (channel, tag) == self._armed:
                    self._armed = None
                    self.log.append(f"dropped: basic.ack, channel {channel}, tag {tag}; connection cut")
                    asyncio.get_running_loop().call_soon(self.on_drop)       # whose errors are not the stream's
                    return
            broker.write(head + payload)
            await broker.drain()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    except ConnectionError:
        pass
    target.close()
