"""The process that owns a private node: `python -m labkit.broker.guard`, in a session of its own, started by `node`.

It starts epmd and the Erlang VM, tells its starter when they are ready, and ends them when the last lease is gone: a lease
is a file that is named after its holder's process id, and void once that process is. A leash, which is a shell that waits for
the end of the guard, kills them when the guard itself is killed. Nothing that it owns outlives it.

It talks with its starter over a socket, its standard input (`control`): first comes the order, then the commands kill, start,
freeze, thaw, and those of `inside`. Each gets one answer, which holds what, why and now of an error if it could not be done.
"""

import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from labkit.broker import inside, recipe
from labkit.broker.failure import explain
from labkit.broker.locks import lock, private
from labkit.broker.node import KEPT
from labkit.broker.server import erlang
from labkit.broker.watch import Exit

PORT_TRIES = 3      #: with other ports, where somebody else took one in between
OPEN_FILES = 8192   #: Erlang makes tables of this size, and some systems say a thousand million
LEASH = 'while read -r line; do pids=$line; done; [ -z "$pids" ] || kill -9 $pids'  # each line is all that is to be killed


class Guard:
    """Owns one node. `watch` returns when the node has ended."""

    def __init__(self, control: socket.socket):
        self._control, self._lines = control, control.makefile("r")
        order = self._request()
        self._server, self._settings, self._linger_s = order["server"], order["settings"], order["linger_s"]
        self._start_s = order["start_s"]
        self._home, self._alive_fd = Path(order["home"]), order["alive_fd"]
        self._leases = self._home / "leases"
        self._events = selectors.DefaultSelector()
        self._holders: dict[str, Exit | None] = {}
        self._node = self._epmd = None
        self._killed = False  # by command: the node's death is then no reason to end
        self._ending = self._left_alone = False

    def watch(self) -> None:
        """Starts the node, keeps it while somebody holds it, and ends it."""
        wake, waker = socket.socketpair()
        for end in (wake, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR1, lambda *_: None)  # look at the leases
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        self._events.register(wake, selectors.EVENT_READ, lambda: _drain(wake))
        self._events.register(self._control, selectors.EVENT_READ, self._obey)
        self._leash = subprocess.Popen(["/bin/sh", "-c", LEASH], stdin=subprocess.PIPE, bufsize=0, pass_fds=[self._alive_fd])
        try:
            if self._start_first():
                self._keep()
        finally:
            self._clear()

    def _start_first(self) -> bool:
        for _ in range(PORT_TRIES):
            try:
                self._recipe = recipe.prepare(self._server, self._home / "node", self._settings)
            except OSError as error:
                failure = {"what": f"The folder {self._home} cannot be used.", "why": error.strerror or str(error),
                           "now": "make room or mend its permissions, or name another folder in LABKIT_STATE"}
                break
            failure = self._start_epmd() or self._start()
            if failure is None or not failure.pop("port_taken", False):
                break
        if failure is None:
            self._write_record()
        self._answer(failure)
        return failure is None

    def _keep(self) -> None:
        empty_since = None
        while not self._ending and (self._killed or self._node.poll() is None):
            self._look_at_leases()
            if self._holders:
                empty_since = None
            elif empty_since is None:
                empty_since = time.monotonic()
            left_s = None if empty_since is None else empty_since + self._linger_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                if self._end_unless_joined():
                    return
                left_s = 0.1  # somebody is joining at this moment
            self._wait(left_s)

    def _end_unless_joined(self) -> bool:
        """Ends while nobody can join, if nobody has; false when somebody holds the lock or a lease."""
        with open(self._home / "lock", "a", opener=private) as door:
            if lock(door):
                self._look_at_leases()
                if not self._holders:
                    self._clear()
                    return True
        return False

    def _clear(self) -> None:
        """Takes the sign off the door, ends what we own, and removes what only a running node needs."""
        (self._home / "record.json").unlink(missing_ok=True)
        for child in (self._node, self._epmd):
            _kill(child)
        self._tell_leash()
        recipe.remove_link(self._home / "node")

    def _look_at_leases(self) -> None:
        names = set(os.listdir(self._leases))
        for name in names - set(self._holders):
            try:
                self._holders[name] = exit_ = None if name == KEPT else Exit(int(name.split("-")[0]))
            except ProcessLookupError:
                (self._leases / name).unlink(missing_ok=True)
                continue
            if exit_:
                self._events.register(exit_, selectors.EVENT_READ, lambda name=name: (self._leases / name).unlink(missing_ok=True))
        for name in set(self._holders) - names:
            if exit_ := self._holders.pop(name):
                self._events.unregister(exit_)
                exit_.close()

    def _obey(self) -> None:
        command = self._request()
        failure = None
        if command is None:  # the starter is gone, or has what it wanted
            self._events.unregister(self._control)
            self._left_alone = True
            return
        if command == "kill":
            self._killed = True
            _kill(self._node)
        elif command == "start":
            if self._node.poll() is not None:
                failure = self._start()
            self._killed = failure is not None
        elif command in inside.CALLS:
            failure = self._call(command)
        else:
            self._node.send_signal({"freeze": signal.SIGSTOP, "thaw": signal.SIGCONT}[command])
        self._answer(failure)

    def _request(self) -> Any:
        line = self._lines.readline()
        if not line:
            return None
        message = json.loads(line)
        self._number = message["number"]
        return message["request"]

    def _answer(self, failure: dict | None) -> None:
        try:
            self._control.sendall(json.dumps({"number": self._number, **(failure or {})}).encode() + b"\n")
        except OSError:  # nobody waits for it any more
            pass

    def _start_epmd(self) -> dict | None:
        """Starts epmd and waits until it listens: a VM that finds none starts one that would outlive it."""
        path = erlang(self._server, "epmd")
        if path is None:
            return {"what": "Erlang's port mapper, epmd, is not here.", "why": "Erlang is not installed, or not on the PATH",
                    "now": "install Erlang, or add the folder with its programs to PATH"}
        _kill(self._epmd)
        self._epmd = self._own([str(path), "-address", "127.0.0.1", "-port", str(self._recipe.epmd_port)])
        if self._listening(self._epmd, self._recipe.epmd_port):
            return None
        return explain(self._recipe, "Erlang's port mapper", self._epmd.poll())

    def _start(self) -> dict | None:
        """Starts the VM and waits until it listens; returns None, or the answer that says why it does not."""
        try:
            self._node = self._own([self._server])
        except OSError as error:
            return {"what": f"{self._server} cannot be started.", "why": error.strerror, "now": "python3 -m labkit doctor"}
        if self._listening(self._node, self._recipe.port):
            return None
        code = self._node.poll()
        _kill(self._node)
        return explain(self._recipe, f"RabbitMQ ({self._server})", code)

    def _call(self, command: str) -> dict | None:
        caller = self._own(inside.call(self._recipe, command))
        try:
            code = caller.wait(inside.SECONDS)
        except subprocess.TimeoutExpired:
            _kill(caller)
            code = None
        return None if code == 0 else {"what": f"The node did not carry out {command!r}.", "why": "it is frozen, killed, or very busy",
                                       "now": f"thaw or start it; {self._recipe.console} says more"}

    def _listening(self, child: subprocess.Popen, port: int) -> bool:
        """Waits until the child listens; false if it ended, does not in time, or nobody waits for it any more."""
        deadline = time.monotonic() + self._start_s
        while not self._ending and child.poll() is None and time.monotonic() < deadline:
            if _listens(port):
                return child.poll() is None  # else it was somebody else who listened
            if self._left_alone and not self._killed:  # the starter was interrupted
                self._ending = True
            self._wait(0.02)
        return False

    def _own(self, command: list[str]) -> subprocess.Popen:
        with open(self._recipe.console, "ab") as console:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console,
                                     env=self._recipe.environ, cwd=self._recipe.folder)
        self._tell_leash(child)
        return child

    def _tell_leash(self, *more: subprocess.Popen) -> None:
        owned = [str(child.pid) for child in (self._node, self._epmd, *more) if child and child.poll() is None]
        self._leash.stdin.write(" ".join(owned).encode() + b"\n")

    def _write_record(self) -> None:
        made = self._recipe
        record = {"guard": os.getpid(), "node": self._node.pid, "server": made.server, "port": made.port,
                  "management_port": made.management_port, "username": made.username, "password": made.password.reveal()}
        new = self._home / "record.new"
        new.write_text(json.dumps(record))
        new.rename(self._home / "record.json")

    def _wait(self, seconds: float | None) -> None:
        for key, _ in self._events.select(seconds):
            key.data()

    def _end(self, *_) -> None:
        self._ending = True


def _kill(child: subprocess.Popen | None) -> None:
    if child:
        child.kill()  # does nothing to a child that has ended
        child.wait()


def _drain(wake: socket.socket) -> None:
    try:
        wake.recv(4096)
    except BlockingIOError:  # the wait inside a command was faster
        pass


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    os.umask(0o077)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft > OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    Guard(socket.socket(fileno=0)).watch()


if __name__ == "__main__":
    sys.exit(main())
