"""A private node, as its holders see it: join or start it, hold it, kill it, let it go.

A node has a folder below the state folder. `lock` is held by whoever joins, starts or ends it; `alive` by its guard for as
long as anything of it runs; each file in `leases` is named after a process that needs it; `record.json` says where it listens.
"""

import atexit
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from labkit import paths
from labkit.broker.address import Address, Secret
from labkit.broker.control import Control
from labkit.broker.locks import lock, locked, private as for_owner, within
from labkit.broker.server import installed, usable, version_of
from labkit.broker.watch import has_ended
from labkit.errors import BrokerError

__all__ = ["Node", "hold", "installed", "running", "stop", "usable", "version_of"]

LINGER_S = 10   #: how long a shared node stays after its last lease: a kernel's restart takes less
START_S = 60    #: for a node to listen
ANSWER_S = 30   #: for the guard's answer, beyond what the node itself may take
END_S = 10      #: for a node to end
KEPT = "kept"   #: the lease of nobody, which only `stop` ends

_ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count(1)


class Node:
    """A held private node. `release` gives it back; it ends with its last holder, whatever becomes of that.

    fresh: whether it was started now, not joined. own: whether nobody else can join it.
    """

    def __init__(self, home: Path, lease: Path, guard: subprocess.Popen | None, control: Control | None):
        record = _record(home)
        self.address = Address("127.0.0.1", record["port"], "/", record["username"], record["password"])
        self.management_port, self.server = record["management_port"], record["server"]
        self.fresh, self.own = guard is not None, control is not None
        self._home, self._lease, self._guard_pid, self._guard, self._control = home, lease, record["guard"], guard, control
        self._owner = os.getpid()
        atexit.register(self.release)

    def tell(self, command: str) -> None:
        """Has the guard do one of its commands, such as kill, and waits until it has; raises BrokerError."""
        self._control.ask(command, ANSWER_S + (START_S if command == "start" else 0))

    def keep(self) -> None:
        """Has the node stay when its holders are gone, until `stop`."""
        (self._home / "leases" / KEPT).touch(0o600)
        _poke(self._home, self._guard_pid)

    def is_ending(self) -> bool:
        """Tells whether the node has ended, or does so within a second."""
        return within(1, lambda: not _lives(self._home, self._guard_pid))

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
    try:
        home = _home(server, private)
        for folder in (home, home / "leases"):
            folder.mkdir(exist_ok=True, mode=0o700)
        with _door(home), open(home / "alive", "a", opener=for_owner) as alive:
            lease = home / "leases" / f"{os.getpid()}-{next(_numbers)}"
            try:
                if _join(home, alive, lease):
                    return Node(home, lease, None, None)
                return _start(server, home, alive, lease, private, settings or {})
            except BaseException:
                lease.unlink(missing_ok=True)
                raise
    except OSError as error:
        reason = error.strerror
    raise BrokerError(f"The folder for RabbitMQ nodes, in {paths.state()}, cannot be used.", reason or "",
                      "make room or mend its permissions, or name another folder in LABKIT_STATE")


def running() -> list[dict[str, Any]]:
    """Returns what the records of this state folder's shared nodes say, each with its `home`. Read-only."""
    records = [(file.parent, _record(file.parent)) for file in sorted(_nodes().glob("*/record.json")) if not _is_private(file.parent)]
    return [{**record, "home": home} for home, record in records if record and _lives(home, record["guard"])]


def stop(record: dict[str, Any]) -> None:
    """Ends a running node, whoever holds it, and waits until nothing of it is left; raises BrokerError."""
    home = record["home"]
    with _door(home):
        if _lives(home, record["guard"]):
            os.kill(record["guard"], signal.SIGTERM)
        with open(home / "alive", "a", opener=for_owner) as alive:
            if not within(END_S, lambda: lock(alive)):
                raise BrokerError("The node did not end.", "its guard is frozen", f"kill -9 {record['guard']}")


def _door(home: Path):
    """Nobody else joins, starts or ends the node meanwhile."""
    return locked(home / "lock", START_S + ANSWER_S, "Another process that starts or ends the same RabbitMQ node")


def _start(server: Path, home: Path, alive: IO, lease: Path, private: bool, settings: dict[str, Any]) -> Node:
    """Starts a guard, which inherits the lock on `alive`, and waits until its node listens."""
    for stale in (home / "leases").iterdir():
        stale.unlink()
    lease.touch(0o600)
    ours, guards = socket.socketpair()
    log = home / "guard.log"
    with guards, open(log, "wb", opener=for_owner) as output:
        environ = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONSAFEPATH": "1"}
        guard = subprocess.Popen([sys.executable, "-m", "labkit.broker.guard"], stdin=guards, stdout=output, stderr=output, cwd=home,
                                 env=environ, start_new_session=True, pass_fds=[alive.fileno()])
    control = Control(ours, str(log))
    try:
        control.ask({"server": str(server), "home": str(home), "settings": settings, "start_s": START_S,
                     "linger_s": 0 if private else LINGER_S, "alive_fd": alive.fileno()}, START_S + ANSWER_S)
        return Node(home, lease, guard, control if private else None)
    except BaseException:
        lease.unlink(missing_ok=True)
        control.close()  # from which the guard sees that nobody wants the node
        _reap(guard)
        raise
    finally:
        if not private:
            control.close()


def _join(home: Path, alive: IO, lease: Path) -> bool:
    """Takes a lease of the node that runs here; false, with `alive` locked for a new one, if none does."""
    joined = False

    def settled() -> bool:
        nonlocal joined
        if lock(alive):
            return True
        if (record := _record(home)) and not has_ended(record["guard"]):
            lease.touch(0o600)
            os.kill(record["guard"], signal.SIGUSR1)
            joined = True
        return joined

    if not within(END_S, settled):
        raise BrokerError("The private RabbitMQ node neither runs nor ends.", "its guard is frozen", "python3 -m labkit broker stop")
    return joined


def _record(home: Path) -> dict[str, Any] | None:
    """Returns what a node's record says, or None while it has none."""
    try:
        record = json.loads((home / "record.json").read_text())
        return {**record, "password": Secret(record["password"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _lives(home: Path, guard: int) -> bool:
    """Tells whether a node's guard lives: the lock is held, and not only by the leash of a killed guard."""
    try:
        with open(home / "alive") as alive:
            return not lock(alive) and not has_ended(guard)
    except FileNotFoundError:
        return False


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


def _home(server: Path, private: bool) -> Path:
    """Returns the node's folder: one for each server, or a new one. Removes what killed private nodes left."""
    nodes = _nodes()
    for left in filter(_is_private, nodes.iterdir()):
        with open(left / "alive", "a", opener=for_owner) as alive:
            if lock(alive) and has_ended(int(left.name.split("-")[1])):
                shutil.rmtree(left, ignore_errors=True)
    return nodes / (f"private-{os.getpid()}-{next(_numbers)}" if private else hashlib.sha256(os.fsencode(server)).hexdigest()[:12])


def _is_private(home: Path) -> bool:
    return home.name.startswith("private-")


def _nodes() -> Path:
    nodes = paths.state() / "nodes"
    nodes.mkdir(mode=0o700, exist_ok=True)
    return nodes
