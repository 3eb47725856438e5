"""Find or start a broker. In this order: LABKIT_AMQP_URL; a private node of an installed RabbitMQ; the compose service.

LABKIT_AMQP_URL         an amqp:// or amqps:// URL of somebody's broker; nothing is done there outside of our own names
LABKIT_RABBITMQ_SERVER  the path of a rabbitmq-server to start instead of the installed one
LABKIT_COMPOSE_PORT, LABKIT_COMPOSE_USER, LABKIT_COMPOSE_PASSWORD
                        the compose service, on loopback: 5672, lab, lab; also read from the file .env beside docker-compose.yml
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.broker import node, reach
from labkit.broker.address import Address, Secret
from labkit.errors import BrokerError

_READY_S = 20  #: from a node's first listening to its first open connection
_DOTENV = Path(__file__).resolve().parents[2] / ".env"


class Broker:
    """A RabbitMQ that answers. Also a context manager, which releases it.

    address: where it is. version: such as "4.3.6". origin: "url", "private" or "compose".
    """

    def __init__(self, address: Address, origin: str, version: str, held: node.Node | None = None):
        self.address, self.origin, self.version, self._node = address, origin, version, held

    def __str__(self) -> str:
        kind = {"url": "from LABKIT_AMQP_URL", "compose": "the compose service", "private": "a private node"}[self.origin]
        return f"RabbitMQ {self.version}, {'a private node of its own' if self.may_kill else kind} on {self.address}"

    def __repr__(self) -> str:
        return f"<Broker {self}>"

    def __enter__(self) -> "Broker":
        return self

    def __exit__(self, *_) -> None:
        self.release()

    @property
    def may_kill(self) -> bool:
        """Tells whether nobody else uses this broker, so that it may be killed."""
        return bool(self._node and self._node.own)

    def kill(self) -> None:
        """Kills the node with SIGKILL, and waits until it is dead; its data stays. Raises BrokerError on a shared broker.

        RabbitMQ writes down which quorum queues it has half a second late, so that one that was declared just before comes back
        empty, or not at all: `settle` first, if that is not what is to be shown.
        """
        self._own("killed").tell("kill")

    def settle(self) -> None:
        """Has the node write to its disk what it would write half a second later."""
        self._own("settled").tell("settle")

    def start(self) -> None:
        """Starts the killed node again, on the same port with the same data, and waits until it is ready."""
        self._own("started again").tell("start")
        reach.version(self.address, _READY_S)

    def freeze(self) -> None:
        """Stops the node with SIGSTOP: it is there, and answers nothing."""
        self._own("frozen").tell("freeze")

    def thaw(self) -> None:
        """Lets a frozen node go on."""
        self._own("thawed").tell("thaw")

    def block(self) -> None:
        """Raises the node's memory alarm: it takes no messages, and still delivers."""
        self._own("blocked").tell("block")

    def unblock(self) -> None:
        """Ends the memory alarm."""
        self._own("unblocked").tell("unblock")

    def keep(self) -> None:
        """Has a private node stay without a holder, until `python3 -m labkit broker stop`."""
        if self._node:
            self._node.keep()

    def release(self) -> None:
        """Gives the broker back; a private node ends with its last holder. May be called again; called at exit."""
        if self._node:
            self._node.release()

    def require_own(self, what: str) -> None:
        """Raises BrokerError where others may be using this broker, so that it may not be `what`, such as "killed"."""
        self._own(what)

    def _own(self, what: str) -> node.Node:
        if not self.may_kill:
            raise BrokerError(f"This RabbitMQ cannot be {what}: others may be using it.", f"it is {self.origin}, not a node of your own"
                              if self.origin != "private" else "all open notebooks share it", "use Lab(private=True), which has a node of its own")
        return self._node


def find(private: bool = False, settings: Mapping[str, Any] | None = None, server: str | os.PathLike | None = None) -> Broker:
    """Returns a broker that answers, started if need be.

    private: a node that nobody else uses, which may be killed; LABKIT_AMQP_URL is then passed over.
    settings: RabbitMQ's application settings for a node of one's own, numbers and booleans: {"consumer_timeout": 3000}.
    server: the rabbitmq-server to start; it too goes before LABKIT_AMQP_URL. Raises BrokerError.
    """
    if settings and not private:
        raise BrokerError("Settings are for a node of one's own.", "this node is shared", "say private=True too")
    for name, value in (settings or {}).items():
        if not name.isidentifier() or not isinstance(value, (bool, int)):
            raise BrokerError(f"The setting {name!r} cannot be given to RabbitMQ.", "its value is neither a number nor True or False", "leave it out")
    if os.environ.get("LABKIT_AMQP_URL") and not private and not server:
        address = named_address()
        return Broker(address, "url", reach.version(address))
    if found := which(server):
        return _private(found, private, settings)
    if private:
        raise BrokerError("There is no RabbitMQ on this machine that could be started.", "an experiment that kills the broker needs a node of its own", ways())
    return _compose()


def which(server: str | os.PathLike | None = None) -> Path | None:
    """Returns the server that would be started: the given one, the one of LABKIT_RABBITMQ_SERVER, or the installed one."""
    named = server or os.environ.get("LABKIT_RABBITMQ_SERVER")
    return Path(named).expanduser().absolute() if named else node.installed()


def named_address() -> Address:
    """Returns the address in LABKIT_AMQP_URL."""
    return Address.parse(Secret(os.environ["LABKIT_AMQP_URL"]))


def compose_address() -> Address:
    """Returns the address of the compose service, running or not."""
    given = {**_dotenv(), **os.environ}
    port = given.get("LABKIT_COMPOSE_PORT", "5672")
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise BrokerError("LABKIT_COMPOSE_PORT is not a port.", "it is no number from 1 to 65535", "unset it, or give the number that docker compose uses")
    return Address("127.0.0.1", int(port), "/", given.get("LABKIT_COMPOSE_USER", "lab"), Secret(given.get("LABKIT_COMPOSE_PASSWORD", "lab")))


def ways() -> str:
    """Returns the commands that give this very system a RabbitMQ."""
    from labkit.setup.packages import ways
    return ways() if sys.platform != "win32" else "use WSL 2, or: docker compose up"


def _private(server: Path, private: bool, settings: Mapping[str, Any] | None) -> Broker:
    while True:
        held = node.hold(server, private, dict(settings or {}))
        try:
            return Broker(held.address, "private", reach.version(held.address, _READY_S if held.fresh else 0), held)
        except BrokerError as error:
            reason, joined_too_late = error, not held.fresh and held.is_ending()
        except BaseException:
            held.release()
            raise
        held.release()
        if not joined_too_late:
            raise BrokerError(reason.what, reason.why, "python3 -m labkit broker stop, then try again")


def _compose() -> Broker:
    address = compose_address()
    reason = None
    try:
        return Broker(address, "compose", reach.version(address))
    except BrokerError as error:
        reason = error.what
    raise BrokerError("There is no RabbitMQ to work with.",
                      f"LABKIT_AMQP_URL is not set, no RabbitMQ is installed, and the compose service does not answer ({reason})", ways())


def _dotenv() -> dict[str, str]:
    """Returns our variables in the file that docker compose reads, too."""
    try:
        lines = _DOTENV.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=")[::2] for line in lines if line.startswith("LABKIT_COMPOSE_"))
    return {name.strip(): value.strip().strip("'\"") for name, value in pairs}
