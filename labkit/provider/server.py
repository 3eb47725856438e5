"""The provider's process: `python -m labkit.provider.server FD PID`, in a session of its own, started by `owner`.

It serves HTTP on a port of the loopback interface, on one event loop, and is told over a socket pair how to behave and asked what it did.
It ends as soon as the kernel does. `POST /charges` with {"effect_key": …} in JSON makes a charge.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import nullcontext, suppress
from http import HTTPStatus
from typing import Any

from labkit import link
from labkit.broker.watch import Exit
from labkit.provider import RUN_HEADER
from labkit.provider.behaviour import BROKEN, BUSY, DOWN, SILENT, WELL, Behaviour, Limit

REFUSED, NO_ANSWER, UNDER_WAY = "refused", "no answer", "under way"
_HEAD_S = 5                                           # for a request to arrive, once it has begun
_BACKLOG = 1024


def main() -> None:
    """Serves until the kernel's end of the socket closes, or the kernel itself ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGHUP):     # an interrupted cell is the kernel's to handle
        signal.signal(number, signal.SIG_IGN)
    with suppress(ProcessLookupError):                # the kernel is gone already
        asyncio.run(_serve(control, Exit(int(sys.argv[2]))))


async def _serve(control: socket.socket, kernel: Exit) -> None:
    asyncio.get_running_loop().add_reader(kernel, os._exit, 0)                # a child of the kernel may hold its end of the socket open
    server, decoder, asked = Server(), link.Decoder(), set()
    reader, writer = await asyncio.open_connection(sock=control)

    async def answer(frame: dict[str, Any]) -> None:
        writer.write(link.encode({"id": frame["id"], "answer": await server.obey(frame)}))
    writer.write(link.encode({"port": server.port}))
    while data := await reader.read(1 << 16):
        for frame, _ in decoder.feed(data):
            asked.add(task := asyncio.create_task(answer(frame)))             # which may have to wait, and keeps nobody else waiting
            task.add_done_callback(asked.discard)
    os._exit(0)                                       # whoever is still here is not waited for


class Visit:
    """One connection. `settled` is set when nothing more can be charged for it; until its head is read, `run` is None."""

    def __init__(self):
        self.run: str | None = None
        self.settled = asyncio.Event()


class Server:
    """What the provider knows: how it behaves, what came in, and what was charged."""

    def __init__(self):
        self.port, self._listener = 0, None
        self._visits: dict[asyncio.Task, Visit] = {}
        self._bills: dict[str, list[tuple[int, str, str]]] = {}               # run -> its charges, for as long as the lab lives
        self._number = 0                              # of the last charge
        self.reset()

    # -- what the kernel says and asks

    async def obey(self, order: dict[str, Any]) -> Any:
        """Does what a frame says, and returns the answer."""
        match order["do"]:
            case "behave":
                return self.behave(Behaviour(**order["behaviour"]))
            case "calls":
                return self._calls
            case "charges":
                return self._charges
            case "reset":
                return self.reset()
            case "refused":
                return self._refuse(order["effect_key"])
            case "bill":
                return await self._bill(order["run"], order["settled"])

    def behave(self, behaviour: Behaviour) -> None:
        """Behaves so from the next call on."""
        self._line = asyncio.Semaphore(behaviour.at_once) if behaviour.at_once else nullcontext()
        self._limit = Limit(behaviour.limit_per_s) if behaviour.limit_per_s else None
        self._turn(behaviour)

    def reset(self) -> None:
        """Behaves well, and counts anew. What is under way belongs to what was counted before."""
        self._calls: list[dict[str, Any]] = []
        self._charges: Counter[str] = Counter()
        self._began_ns = time.monotonic_ns()
        self.behave(Behaviour())

    async def _bill(self, run: str, settled: bool) -> list[tuple[int, str, str]]:
        """Returns a run's charges as (time in ns, effect key, charge); with `settled`, once no call of it can lead to another."""
        if settled:
            self._accept()                            # also what a process sent just before it was killed
            for visit in [*self._visits.values()]:
                if visit.run in (run, None):
                    await visit.settled.wait()
        return self._bills.get(run, [])

    def _refuse(self, effect_key: str) -> None:
        """Hears from a caller that nobody listened: only callers can tell."""
        self._note_call(effect_key)["status"] = REFUSED
        if self._behaviour.how == DOWN:
            self._spend()

    # -- the door

    def _listen(self) -> None:
        if self._listener is None:
            self._reserve()
        if not self._open:
            self._open = True
            self._listener.listen(_BACKLOG)
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _close(self) -> None:
        """Lets nobody in. The port stays ours: a socket that is bound and does not listen refuses whoever comes."""
        if self._listener is None or self._open:
            if self._listener:
                asyncio.get_running_loop().remove_reader(self._listener)
                self._listener.close()
            self._reserve()

    def _reserve(self) -> None:
        self._listener, self._open = socket.socket(), False
        self._listener.setblocking(False)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]

    def _accept(self) -> None:
        """Lets in all who stand at the door."""
        while self._open:
            try:
                connection, _ = self._listener.accept()
            except OSError:                           # nobody, or gone again
                return
            task = asyncio.create_task(self._receive(connection, visit := Visit()))
            self._visits[task] = visit
            task.add_done_callback(self._visits.pop)

    # -- one call

    async def _receive(self, connection: socket.socket, visit: Visit) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
                async with asyncio.timeout(_HEAD_S):
                    request = await _Request.read(reader)
                visit.run = request.run
                answer = await self._treat(request)
                visit.settled.set()
                if answer is None:
                    await reader.read()               # until the caller has enough
                else:
                    writer.write(_encoded(*answer))
                    await writer.drain()
        finally:
            visit.settled.set()
            writer.close()

    async def _treat(self, request: "_Request") -> tuple[int, Any, dict[str, Any]] | None:
        """Does what is asked, and returns status, body and headers of the answer; None for silence."""
        if request.target != ("POST", "/charges"):
            return 404, {"error": "there is POST /charges, and nothing else"}, {}
        call, began_ns = self._note_call(request.effect_key), time.monotonic_ns()
        status, body, headers = await self._charge(request, call["at_ms"])
        call["status"] = status
        if status == NO_ANSWER:
            return None
        call["took_ms"] = (time.monotonic_ns() - began_ns) / 1e6              # not by what it counts from, which may have changed meanwhile
        return status, body, headers

    async def _charge(self, request: "_Request", at_ms: float) -> tuple[Any, Any, dict[str, Any]]:
        if not isinstance(request.effect_key, str):
            return 400, {"error": "the body is to be JSON with an effect_key, a text"}, {}
        behaviour, charges, line, limit = self._behaviour, self._charges, self._line, self._limit
        if behaviour.how != WELL:
            self._spend()
        if behaviour.how == BUSY:
            return 429, {"error": "too many calls, come again later"}, {"Retry-After": behaviour.retry_after_s}
        if behaviour.how == BROKEN:
            return 500, {"error": "something is broken"}, {}
        if limit and not limit.takes(at_ms):
            return 429, {"error": f"more than {behaviour.limit_per_s} calls within a second"}, {"Retry-After": 1}
        async with line:                              # which serves whoever came first
            if behaviour.ms:
                await asyncio.sleep(behaviour.ms / 1000)
        self._number += 1
        charge = f"charge-{self._number}"
        charges[request.effect_key] += 1
        if request.run:
            self._bills.setdefault(request.run, []).append((time.monotonic_ns(), request.effect_key, charge))
        return NO_ANSWER if behaviour.how == SILENT else 200, {**request.body, "charge": charge}, {}

    def _note_call(self, effect_key: Any) -> dict[str, Any]:
        self._calls.append({"at_ms": (time.monotonic_ns() - self._began_ns) / 1e6, "status": UNDER_WAY, "effect_key": effect_key, "took_ms": None})
        return self._calls[-1]

    def _spend(self) -> None:
        """Counts a call that met a bad behaviour, and recovers after the last one that was to."""
        if self._bad_left is not None:
            self._bad_left -= 1
            if self._bad_left <= 0:
                self._turn(self._behaviour.recovered)

    def _turn(self, behaviour: Behaviour) -> None:
        """Changes the way; the line and the limit stay."""
        self._behaviour, self._bad_left = behaviour, behaviour.calls
        (self._close if behaviour.how == DOWN else self._listen)()


class _Request:
    """A request that was read to its end. `body` is {} where it is no JSON object."""

    def __init__(self, target: tuple[str, str], run: str, body: bytes):
        self.target, self.run = target, run
        try:
            self.body = json.loads(body)
        except ValueError:
            self.body = {}
        self.body = self.body if isinstance(self.body, dict) else {}
        self.effect_key = self.body.get("effect_key")

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> "_Request":
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = headers.get("content-length", "0")
        body = await reader.readexactly(int(length) if length.isdecimal() else 0)
        return cls(tuple((first.split() + ["", ""])[:2]), headers.get(RUN_HEADER.lower(), ""), body)


def _encoded(status: int, body: Any, headers: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Content-Type: application/json", f"Content-Length: {len(text)}", "Connection: close",
             *[f"{name}: {value}" for name, value in headers.items()], "", ""]
    return "\r\n".join(lines).encode() + text


if __name__ == "__main__":
    main()
