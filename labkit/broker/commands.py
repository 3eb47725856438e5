"""`python3 -m labkit broker start|stop|status|login`, and what `doctor` asks about the broker."""

import os
from pathlib import Path
from typing import NamedTuple

from labkit.broker import finding, node, reach, server as servers
from labkit.broker.address import Address
from labkit.errors import BrokerError


class Check(NamedTuple):
    """One thing that doctor looked at: whether it is well, what was found, and the command that mends it."""

    name: str
    ok: bool
    found: str
    remedy: str


def main(argv: list[str]) -> int:
    """Carries out one of start, stop, status and login; returns 0, or 1 where status and login find no node."""
    return {"start": _start, "stop": _stop, "status": _status, "login": _login}[argv[0]]()


def checks() -> list[Check]:
    """Returns what doctor tells about the broker: which one would be used, and what it needs. Starts nothing."""
    if os.environ.get("LABKIT_AMQP_URL"):
        return [_answers("broker, from LABKIT_AMQP_URL", finding.named_address)]
    server = finding.which()
    if server is None:
        return [_answers("broker, the compose service", finding.compose_address, finding.ways())]
    return [_server(server), _erlang(server), _node(server)]


def _start() -> int:
    with finding.find() as broker:
        broker.keep()
        print(broker)
    return 0


def _stop() -> int:
    records = node.running()
    for record in records:
        node.stop(record)
        print(f"Stopped: {_line(record)}")
    if not records:
        print("No private node is running.")
    return 0


def _status() -> int:
    records = node.running()
    for record in records:
        print(f"{_line(record)}; held by {_holders(record['home'])}")
    if not records:
        print("No private node is running; one is started when a notebook needs it.")
    return 0 if records else 1


def _login() -> int:
    """The one place that prints a password: on demand, for the management page of a node that is this user's own."""
    records = node.running()
    for record in records:
        print(f"{_line(record)}\n  management page  http://127.0.0.1:{record['management_port']}/\n"
              f"  user             {record['username']}\n  password         {record['password'].reveal()}")
    if not records:
        print("No private node is running. What now: python3 -m labkit broker start")
    return 0 if records else 1


def _line(record: dict) -> str:
    version = node.version_of(Path(record["server"]))
    return f"RabbitMQ{version and ' ' + version}, a private node on 127.0.0.1:{record['port']}"


def _holders(home: Path) -> str:
    names = [lease.name for lease in (home / "leases").iterdir()]
    processes = sorted({int(name.split("-")[0]) for name in names if name != node.KEPT})
    parts = [f"process {', '.join(map(str, processes))}"] if processes else []
    return " and ".join(parts + ["`broker start`, until `broker stop`"] * (node.KEPT in names)) or "nobody; it is about to end"


def _answers(name: str, address, remedy: str = "") -> Check:
    """A check that a broker that is not ours to start answers."""
    try:
        where: Address = address()
        return Check(name, True, f"RabbitMQ {reach.version(where)} at {where}", "")
    except BrokerError as error:
        return Check(name, False, f"{error.what} {error.why}", remedy or error.now)


def _server(server: Path) -> Check:
    try:
        node.usable(server)
    except BrokerError as error:
        return Check("RabbitMQ", False, f"{error.what} {error.why}", error.now)
    return Check("RabbitMQ", True, f"{node.version_of(server) or 'version not known before it starts'}, {server}", "")


def _erlang(server: Path) -> Check:
    erl, epmd = servers.erlang(server), servers.erlang(server, "epmd")
    if not (erl and epmd):
        return Check("Erlang", False, f"{'epmd' if erl else 'erl'} is not on the PATH", "install Erlang, or add the folder of its programs to PATH")
    releases = sorted(int(entry.name) for entry in (erl.resolve().parents[1] / "releases").glob("[0-9]*") if entry.name.isdecimal())
    return Check("Erlang", True, f"{releases[-1] if releases else 'version not known'}, {erl}, {epmd}", "")


def _node(server: Path) -> Check:
    here = [record for record in node.running() if record["server"] == str(server)]
    if not here:
        return Check("private node", True, "not running; started when a notebook needs it, on free ports", "")
    record, where = here[0], Address("127.0.0.1", here[0]["port"], "/", here[0]["username"], here[0]["password"])
    try:
        reach.version(where)
    except BrokerError as error:
        return Check("private node", False, f"{error.what} {error.why}", "python3 -m labkit broker stop")
    return Check("private node", True, f"AMQP on {record['port']}, management page on {record['management_port']}, held by {_holders(record['home'])}", "")
