"""A private node, as its holders see it: find an installed server, join or start a node, hold it, kill it, let it go.

A node has a folder below the state folder. `lock` is held by whoever joins, starts or ends it; `alive` by its guard as long as
anything of it runs; each file in `leases` is named after a process that needs it; `record.json` says where it listens.
"""

import atexit
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit import paths
from labkit.broker.address import Address, Secret
from labkit.broker.recipe import search_path
from labkit.broker.watch import has_ended
from labkit.errors import BrokerError

LINGER_S = 10       #: how long a shared node stays after its last lease: a kernel restart takes less
LOCK_S = 90         #: for another process that is starting the same node
START_S = 60        #: for a node to listen
ANSWER_S = 30       #: for the guard's answer, beyond what the node itself may take
END_S = 10          #: for a node to end

_ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count(1)


def installed() -> Path | None:
    """Returns the rabbitmq-server of this machine that would be used, or None. Read-only.

    Not /usr/sbin/rabbitmq-server of Debian and Fedora: that wrapper is for the system service, and demands root.
    """
    prefixes = (os.environ.get("CONDA_PREFIX"), sys.prefix)
    brew = (os.environ.get("HOMEBREW_PREFIX"), "/opt/homebrew", "/usr/local", "/home/linuxbrew/.linuxbrew")
    candidates = [*(Path(prefix, "bin") for prefix in prefixes if prefix), Path("/usr/lib/rabbitmq/bin"),
                  *(Path(prefix, "opt/rabbitmq/sbin") for prefix in brew if prefix)]
    for folder in map(Path, (*candidates, *search_path("").split(os.pathsep))):
        server = folder / "rabbitmq-server"
        if os.access(server, os.X_OK) and server.is_file() and not _wraps(server):
            return server
    return None


def version_of(server: Path) -> str:
    """Returns the version of a server that need not run, such as "4.3.6", or "" where its folders do not say. Read-only."""
    real = Path(server).resolve().parent
    for pattern in ("../lib/rabbitmq_server-*/plugins/rabbit-[0-9]*", "../plugins/rabbit-[0-9]*", "../lib/rabbitmq_server-*", "../libexec/plugins/rabbit-[0-9]*",
                    "../lib/erlang/lib/rabbitmq_server-*", "root/usr/lib/rabbitmq/lib/rabbitmq_server-*"):
        for found in real.glob(pattern):
            return found.name.removeprefix("rabbitmq_server-").removeprefix("rabbit-").removesuffix(".ez")
    return ""


class Node:
    """A held private node. `release` gives it back; it ends with its last holder, whatever becomes of that."""

    def __init__(self, home: Path, lease: Path, record: dict[str, Any], guard: subprocess.Popen | None, control: socket.socket | None):
        self.address = Address("127.0.0.1", record["port"], "/", record["username"], record["password"])
        self.management_port, self.server = record["management_port"], record["server"]
        self._home, self._lease, self._guard_pid = home, lease, record["guard"]
        self._guard, self._control = guard, control
        self.fresh = guard is not None  # started by us, not joined
        self._owner = os.getpid()
        atexit.register(self.release)

    @property
    def own(self) -> bool:
        """Tells whether nobody else can join this node."""
        return self._control is not None

    def tell(self, command: str) -> None:
        """Has the guard kill, start, freeze or thaw the node, and waits until it has; raises BrokerError."""
        _heed(_ask(self._control, command, ANSWER_S + (START_S if command == "start" else 0)))

    def keep(self) -> None:
        """Has the node stay when its holders are gone, until `stop`."""
        (self._home / "leases" / "kept").touch()
        _poke(self._home, self._guard_pid)

    def release(self) -> None:
        """Gives the lease back. Does nothing the second time, or in a process that was forked from the holder."""
        if self._lease is None or os.getpid() != self._owner:
            return
        lease, self._lease = self._lease, None
        atexit.unregister(self.release)
        lease.unlink(missing_ok=True)
        _poke(self._home, self._guard_pid)
        if self.own:
            self._control.close()
            _reap(self._guard)
            shutil.rmtree(self._home, ignore_errors=True)


def hold(server: Path, private: bool = False, settings: dict[str, Any] | None = None) -> Node:
    """Joins the shared node of this state folder and server, or starts it; with `private` starts one of its own.

    settings: RabbitMQ's application settings, for a node of its own. Raises BrokerError.
    """
    usable(server)
    home = _home(server, private)
    (home / "leases").mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(home):
        lease = home / "leases" / f"{os.getpid()}-{next(_numbers)}"
        alive = open(home / "alive", "a")
        try:
            record = _join(home, alive, lease)
            if record:
                return Node(home, lease, record, None, None)
            return _start(server, home, alive, lease, private, settings or {})
        except BaseException:
            lease.unlink(missing_ok=True)
            raise
        finally:
            alive.close()


def usable(server: Path) -> None:
    """Raises BrokerError unless the server is a program that can be run. Read-only."""
    if not server.is_file():
        raise BrokerError(f"There is no {server}.", "LABKIT_RABBITMQ_SERVER, or `server`, names a file that is not there",
                          "name a rabbitmq-server, or unset LABKIT_RABBITMQ_SERVER to use the installed one")
    if not os.access(server, os.X_OK):
        raise BrokerError(f"{server} cannot be run.", "the file is not executable for this user", f"chmod +x {server}")


def running() -> list[dict[str, Any]]:
    """Returns what the records of the shared nodes that run in this state folder say, each with its `home`. Read-only."""
    found = []
    for file in sorted(_nodes().glob("*/record.json")):
        record = _record(file.parent)
        if record and not file.parent.name.startswith("private-"):
            found.append({**record, "home": file.parent})
    return found


def stop(record: dict[str, Any]) -> None:
    """Ends a running node, whoever holds it, and waits until nothing of it is left; raises BrokerError."""
    home = record["home"]
    with _locked(home):
        for lease in (home / "leases").iterdir():
            lease.unlink(missing_ok=True)
        os.kill(record["guard"], signal.SIGTERM)
        with open(home / "alive", "a") as alive:
            if not _within(END_S, lambda: _lock(alive)):
                raise BrokerError("The node did not end.", "its guard is frozen", f"kill -9 {record['guard']}")


def _start(server: Path, home: Path, alive, lease: Path, private: bool, settings: dict[str, Any]) -> Node:
    for stale in (home / "leases").iterdir():
        stale.unlink()
    lease.touch()
    ours, guards = socket.socketpair()
    with open(home / "guard.log", "wb") as log:
        environ = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONSAFEPATH": "1"}
        guard = subprocess.Popen([sys.executable, "-m", "labkit.broker.guard"], stdin=guards, stdout=log, stderr=log, cwd=home,
                                 env=environ, start_new_session=True, pass_fds=[alive.fileno()])
    guards.close()
    try:
        order = {"server": str(server), "home": str(home), "settings": settings, "linger_s": 0 if private else LINGER_S, "start_s": START_S, "alive_fd": alive.fileno()}
        _heed(_ask(ours, order, START_S + ANSWER_S), home)
        return Node(home, lease, _record(home), guard, ours if private else None)
    except BaseException:
        lease.unlink(missing_ok=True)
        ours.close()  # from which the guard sees that nobody wants it
        _reap(guard)
        raise
    finally:
        if not private:
            ours.close()


def _join(home: Path, alive, lease: Path) -> dict[str, Any] | None:
    """Takes a lease of the node that runs here and returns its record; None, with `alive` locked for a new one, if none does."""
    joined = []

    def settled() -> bool:
        if _lock(alive):
            return True
        if record := _record(home):
            lease.touch()
            _poke(home, record["guard"])
            joined.append(record)
        return bool(joined)

    if not _within(END_S, settled):
        raise BrokerError("The private RabbitMQ node neither runs nor ends.", "its guard is frozen", "python3 -m labkit broker stop")
    return joined[0] if joined else None


def _record(home: Path) -> dict[str, Any] | None:
    """Returns what the node's record says while its guard lives, else None."""
    try:
        record = json.loads((home / "record.json").read_text())
    except (OSError, ValueError):
        return None
    record["password"] = Secret(record["password"])
    return record if _lives(home, record["guard"]) else None


def _lives(home: Path, guard: int) -> bool:
    """Tells whether a node's guard lives: the lock is held, and not only by the leash of a killed guard."""
    with open(home / "alive", "a") as alive:
        return not _lock(alive) and not has_ended(guard)


def _ask(control: socket.socket, message: Any, deadline_s: float) -> dict:
    control.settimeout(deadline_s)
    control.sendall(json.dumps(message).encode() + b"\n")
    return json.loads(control.makefile("r").readline() or "{}")


def _heed(answer: dict, home: Path | None = None) -> None:
    if answer.get("ok"):
        return
    if "what" in answer:
        raise BrokerError(answer["what"], answer["why"], answer["now"])
    raise BrokerError("The guard of the private RabbitMQ node ended.", "something killed it", f"look into {home / 'guard.log'}" if home else "start it anew")


def _home(server: Path, private: bool) -> Path:
    """Returns the node's folder: one for each server, or a new one. Removes what killed private nodes left."""
    nodes = _nodes()
    for left in nodes.glob("private-*"):
        with open(left / "alive", "a") as alive:
            if _lock(alive) and has_ended(int(left.name.split("-")[1])):
                shutil.rmtree(left, ignore_errors=True)
    name = f"private-{os.getpid()}-{next(_numbers)}" if private else hashlib.sha256(os.fsencode(server)).hexdigest()[:12]
    return nodes / name


def _nodes() -> Path:
    nodes = paths.state() / "nodes"
    nodes.mkdir(mode=0o700, exist_ok=True)
    return nodes


def _wraps(server: Path) -> bool:
    return server.resolve().name == "rabbitmq-script-wrapper" or (server.stat().st_size < 1 << 16 and b"Only root or rabbitmq" in server.read_bytes())


@contextmanager
def _locked(home: Path):
    """Holds the lock on joining, starting and ending."""
    with open(home / "lock", "a") as lock:
        if not _within(LOCK_S, lambda: _lock(lock)):
            raise BrokerError("Another process has been starting or ending the same RabbitMQ node for too long.", "it is frozen",
                              "python3 -m labkit broker status")
        yield


def _lock(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _poke(home: Path, guard: int) -> None:
    """Has the guard look at its leases."""
    if _lives(home, guard):
        os.kill(guard, signal.SIGUSR1)


def _reap(guard: subprocess.Popen) -> None:
    try:
        guard.wait(END_S)
    except subprocess.TimeoutExpired:
        guard.kill()  # its leash ends the node
        guard.wait()


def _within(seconds: float, condition) -> bool:
    """Waits until the condition holds; false if it does not within so many seconds. File locks have no event to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
