"""The provider as the kernel sees it: `lab.provider`. It starts the process when it is first needed, and ends it with the lab.

What it says and asks goes over a socket pair, on the controller thread, so that an interrupted cell leaves nothing half said.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from labkit import controller, link
from labkit.errors import PlanError, WorkerError
from labkit.provider.behaviour import Behaviour, planned

_START_S = 20
_END_S = 5


class Gone(Exception):
    """Raised when the provider's process has ended, and so cannot answer."""


class Provider:
    """A dependency outside, real and in your hands: a small HTTP server that charges customers, and behaves as it is told.

    Handlers call it with `shop.provider.charge(effect_key)`. It is started when it is first needed.
    """

    def __init__(self):
        self._process: Process | None = None
        self._starting, self._closed = asyncio.Lock(), False
        self._behaviour = Behaviour()

    def behave(self, how: str, **numbers: float) -> None:
        """Has the provider behave "well", or be "down", "slow", "busy", "broken" or "silent", from the next call on.

        ms:            how long the work on a call takes, or the answer of a slow provider
        calls:         so many calls meet the bad behaviour; then it recovers, and behaves well
        at_once:       it works on so many calls at the same time; the others wait in line
        limit_per_s:   of more calls within a second it answers 429
        retry_after_s: what it says when it is busy
        At down, the calls are those of handlers and producers: nobody else can tell the provider that it was not there.
        Raises PlanError.
        """
        behaviour = planned(how, numbers)
        self._do(self._tell(behaviour))

    @property
    def calls(self) -> list[dict[str, Any]]:
        """What came in since it counts, in order: {"at_ms": since then, "status": 200, "effect_key": …, "took_ms": 3.1}.

        `took_ms` is None where it did not answer, or not yet. The status is what it answered, "no answer", "refused" (nobody listened), or "under way".
        """
        return self._do(self._ask_if_there("calls", []))

    @property
    def charges(self) -> dict[str, int]:
        """The charges that were made since it counts: effect key -> number."""
        return self._do(self._ask_if_there("charges", {}))

    @property
    def url(self) -> str:
        """Where it listens, to call it by other means than the shop's: POST {"effect_key": …} in JSON."""
        return f"http://127.0.0.1:{self._do(self.reach()).port}/charges"

    def reset(self) -> None:
        """Behaves well again, and counts anew, calls and charges."""
        self._behaviour = Behaviour()
        self._do(self._ask_if_there("reset", None))

    def close(self) -> None:
        """Ends the process; a lab does so when it is closed."""
        self._closed = True
        if self._process:
            controller.loop().call_soon_threadsafe(self._process.leave)
            self._process.wait()

    def __repr__(self) -> str:
        return f"<provider that is to behave {self._behaviour.how!r}>"

    async def reach(self) -> "Process":
        """Returns the process, started if it is not there. For the controller thread. Raises WorkerError."""
        async with self._starting:
            if self._closed:
                raise PlanError("This lab is closed.", "`lab.close()` was called", "Make a new one: lab = Lab().")
            if self._process is None or self._process.gone:
                self._process = await Process.start()
                await self._process.ask("behave", behaviour=asdict(self._behaviour))
            return self._process

    async def _tell(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        await (await self.reach()).ask("behave", behaviour=asdict(behaviour))

    async def _ask_if_there(self, what: str, otherwise: Any) -> Any:
        return otherwise if self._process is None or self._process.gone else await self._process.ask(what)

    def _do(self, coroutine: Coroutine) -> Any:
        try:
            return controller.carry_out(coroutine)
        except Gone:
            raise WorkerError("The provider does not answer.", "its process was ended", "Do it again: another one is started.") from None


class Process:
    """The provider's process, and the line to it. `gone` tells that it has ended."""

    def __init__(self, process: subprocess.Popen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process, self._reader, self._writer = process, reader, writer
        self._asked: dict[int, asyncio.Future] = {}
        self._decoder, self._number = link.Decoder(), 0
        self.port, self.gone = 0, False
        self.pid = process.pid

    @classmethod
    async def start(cls) -> "Process":
        """Starts it, and returns when it listens. Raises WorkerError."""
        mine, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != "LABKIT_AMQP_URL"}
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        process = subprocess.Popen([sys.executable, "-m", "labkit.provider.server", str(theirs.fileno()), str(os.getpid())],
                                   pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        started = cls(process, *await asyncio.open_connection(sock=mine))
        try:
            async with asyncio.timeout(_START_S):
                while not started.port:
                    await started._hear()
        except (Gone, TimeoutError):
            process.kill()
            started.leave()
            raise WorkerError("The provider could not be started.", "its process ended, or the machine is overloaded", "Run the cell again.") from None
        except BaseException:                         # interrupted: it ends by itself when nobody holds its line
            started.leave()
            raise
        started._listening = asyncio.create_task(started._listen())
        return started

    async def ask(self, what: str, **about: Any) -> Any:
        """Says or asks something, and returns the answer. Raises Gone."""
        if self.gone:
            raise Gone
        self._number += 1
        answer = self._asked[self._number] = asyncio.get_running_loop().create_future()
        self._writer.write(link.encode({"id": self._number, "do": what, **about}))
        return await answer

    def leave(self) -> None:
        """Lets go of the line, on which the process ends by itself."""
        self._writer.close()

    def wait(self) -> None:
        """Returns when the process has ended."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:             # frozen, by hand
            self._process.kill()
            self._process.wait()

    async def _listen(self) -> None:
        try:
            while True:
                await self._hear()
        except Gone:
            self.gone = True
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(Gone())
            self._process.poll()

    async def _hear(self) -> None:
        try:
            data = await self._reader.read(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise Gone
        for frame, _ in self._decoder.feed(data):
            if "port" in frame:
                self.port = frame["port"]
            elif not (answer := self._asked.pop(frame["id"])).done():         # who asked may have been interrupted
                answer.set_result(frame["answer"])
