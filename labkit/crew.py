"""The worker processes as the kernel sees them: the fork server, one handle a process, and standbys that are connected.

A worker costs a fork and a connection, so a few wait, connected, for the next run; a run takes what it needs.
"""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from labkit import link, topology
from labkit.broker.address import Address
from labkit.errors import WorkerError
from labkit.trace import Reader

STANDBY = 2


class WorkerProcess:
    """One worker process: its line, its trace, what it prints, and how it ended. Lives on the event loop."""

    def __init__(self, server: "ForkServer", address: Address):
        self.free = False                             # connected, and done with every job that it was given
        self._given = 0
        self.pid: int | None = None
        self.exit_status: int | None = None           # as subprocess has it: -9 is a death by signal 9
        self.on_frame: Callable[[dict], None] = self._while_waiting
        self.on_print: Callable[[bytes], None] = lambda data: None
        self.on_end: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._decoder = link.Decoder()
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        self._trace = tempfile.TemporaryFile()
        self.trace = Reader(self._trace.fileno())
        self._output, output_write = os.pipe()
        self._status, status_write = os.pipe()
        os.set_blocking(self._output, False)
        server.spawn(theirs.fileno(), self._trace.fileno(), output_write, status_write)
        theirs.close()
        os.close(output_write)
        os.close(status_write)
        self._loop.add_reader(self._line, self._hear)
        self._loop.add_reader(self._output, self.read_prints)
        self._loop.add_reader(self._status, self._learn_status)
        self.tell(topology.wire(address))

    def tell(self, frame: dict[str, Any], blob: bytes = b"") -> None:
        """Sends a frame; a worker that is dead does not hear it."""
        try:
            self._line.setblocking(True)
            self._line.sendall(link.encode(frame, blob))
        except OSError:
            pass
        finally:
            self._line.setblocking(False)

    def give(self, job: dict[str, Any], handler: bytes) -> None:
        """Sends a job; the worker may have called itself free before it heard of it, so its word names how many it did."""
        self.free, self._given = False, self._given + 1
        self.tell({"t": "job", **job}, handler)

    def hear_free(self, done: int) -> None:
        """Takes a worker's word that it is free, having done so many jobs."""
        self.free = done == self._given

    def signal(self, number: int) -> None:
        """Sends a signal to the process, unless it was reaped."""
        if self.pid and self.exit_status is None:
            os.kill(self.pid, number)

    def discard(self) -> None:
        """Gives the process up: closes its line, on which it ends by itself."""
        self._loop.remove_reader(self._line)
        self._line.close()

    def _while_waiting(self, frame: dict[str, Any]) -> None:
        if frame["t"] == "free":
            self.hear_free(frame["done"])

    def _hear(self) -> None:
        try:
            data = self._line.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._line)
        for frame, _ in self._decoder.feed(data):
            self.on_frame(frame)

    def read_prints(self) -> None:
        """Takes what the process has printed by now."""
        while self._output is not None:
            try:
                data = os.read(self._output, 1 << 16)
            except BlockingIOError:
                return
            if data:
                self.on_print(data)
            else:
                self._loop.remove_reader(self._output)
                os.close(self._output)
                self._output = None

    def _learn_status(self) -> None:
        data = os.read(self._status, 100)
        words = data.decode().split()
        if words and self.pid is None:
            self.pid = int(words.pop(0))
        if words or not data:                         # no word about the end: the fork server is gone, and so is the worker
            self.exit_status = int(words[0]) if words else 1
            self._loop.remove_reader(self._status)
            os.close(self._status)
            self.on_end()


class ForkServer:
    """The kernel's end of the fork server."""

    def __init__(self, address: Address, preload: str):
        self._socket, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name != "LABKIT_AMQP_URL"}
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        self._process = subprocess.Popen([sys.executable, "-m", "labkit.forkserver", str(theirs.fileno()), str(os.getpid()), preload],
                                         pass_fds=(theirs.fileno(),), env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        self._socket.sendall(link.encode(topology.wire(address)))

    def spawn(self, *fds: int) -> None:
        """Asks for a worker with these four descriptors: line, trace, output, status."""
        try:
            socket.send_fds(self._socket, [b"w"], list(fds))
        except OSError:
            raise WorkerError("A worker process could not be started.", "the fork server ended", "Restart the kernel.") from None

    def close(self) -> None:
        """Ends the fork server and every worker."""
        self._socket.close()
        self._process.wait()


class Crew:
    """Standbys that are connected, and the way to get a worker."""

    def __init__(self, address: Address, preload: str):
        """preload: a module that every worker needs, loaded once for all of them."""
        self._server, self._address, self._standbys = ForkServer(address, preload), address, []

    def take(self, via: Address | None = None) -> WorkerProcess:
        """Returns a worker process, connected or about to be; by another address, `via`, where one is given."""
        if via is not None:
            return WorkerProcess(self._server, via)
        self._standbys = [standby for standby in self._standbys if standby.exit_status is None]
        for standby in sorted(self._standbys, key=lambda standby: not standby.free):
            self._standbys.remove(standby)
            return standby
        return WorkerProcess(self._server, self._address)

    def give_back(self, process: WorkerProcess) -> None:
        """Takes back a worker that is free again."""
        process.on_frame, process.on_print, process.on_end = process._while_waiting, lambda data: None, lambda: None
        self._standbys.append(process)

    def refill(self) -> None:
        """Has standbys made for the next run."""
        while len(self._standbys) < STANDBY:
            self._standbys.append(WorkerProcess(self._server, self._address))

    def close(self) -> None:
        """Ends every worker."""
        self._server.close()
