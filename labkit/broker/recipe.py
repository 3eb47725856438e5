"""What a private node is made of: its files, its ports, its environment, and nothing of the machine's own RabbitMQ.

Every socket is on loopback: AMQP, the management page, Erlang's distribution port, and epmd. The node begins empty each
time, so that neither a killed node's data nor another version's can be in its way.
"""

import hashlib
import os
import random
import re
import secrets
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.broker.address import Secret
from labkit.broker.server import search_path

#: above it the node stops taking messages; far more than the lab needs, little for a laptop
MEMORY_BYTES = 512 << 20
#: below it the node stops taking messages
DISK_FREE_BYTES = 50_000_000
#: a dead letter that its target has not confirmed is sent again after this; RabbitMQ's own three minutes are long for who watches a restart
DEAD_LETTER_AGAIN_MS = 2000
#: below the ports that systems hand out to outgoing connections, which could take a port while its node is down
PORTS = range(20000, 32000)
#: what the node gets of our environment. Not HOME, and no RABBITMQ_* or ERL_*: those belong to other nodes
KEEP = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")

@dataclass(frozen=True)
class Recipe:
    """One incarnation of a node: what to start, and where it will listen."""

    server: str
    folder: Path
    environ: dict[str, str]
    port: int
    management_port: int
    epmd_port: int
    username: str
    password: Secret

    @property
    def console(self) -> Path:
        """The file that takes the node's log."""
        return self.folder / "console.log"


def prepare(server: str, folder: Path, settings: dict[str, Any]) -> Recipe:
    """Makes an empty node in `folder` (removing what is there) and returns how to start it; raises OSError."""
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("home", "data", "log", "generated"):
        (folder / part).mkdir(parents=True, mode=0o700)
    plain = plain_path(folder)
    port, management_port, dist_port, epmd_port = _free_ports(4)
    username, password = f"lab-{secrets.token_hex(4)}", Secret(secrets.token_urlsafe(24))
    _write(folder / "advanced.config", _config(username, password, management_port, settings))
    _write(folder / "plugins", "[rabbitmq_management].\n")
    _write(folder / "inetrc", _inetrc())
    _write(folder / "home" / ".erlang.cookie", secrets.token_hex(20), 0o400)
    environ = {name: os.environ[name] for name in KEEP if name in os.environ} | {
        "PATH": search_path(server),
        "HOME": f"{plain}/home",
        "ERL_INETRC": f"{plain}/inetrc",
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(epmd_port),
        "RUNNING_UNDER_SYSTEMD": "true",  # the process that we start becomes the Erlang VM itself
        "RABBITMQ_NODENAME": f"lab-{secrets.token_hex(4)}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(dist_port),
        "RABBITMQ_CONF_ENV_FILE": f"{plain}/none",
        "RABBITMQ_CONFIG_FILE": f"{plain}/none.conf",
        "RABBITMQ_ADVANCED_CONFIG_FILE": f"{plain}/advanced.config",
        "RABBITMQ_ENABLED_PLUGINS_FILE": f"{plain}/plugins",
        "RABBITMQ_GENERATED_CONFIG_DIR": f"{plain}/generated",
        "RABBITMQ_MNESIA_BASE": f"{plain}/data",
        "RABBITMQ_PID_FILE": f"{plain}/pid",
        "RABBITMQ_LOG_BASE": f"{plain}/log",
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_SERVER_ERL_ARGS": "+P 131072 +t 1048576 +stbt u +sbwt none +sbwtdcpu none +sbwtdio none +A 4 +SDio 4",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    return Recipe(server, folder, environ, port, management_port, epmd_port, username, password)


def plain_path(folder: Path) -> Path:
    """Returns a path of the folder that RabbitMQ's shell scripts can read: itself, or a link where it has a space or the like.

    The link is named after the folder and the user, in the folder for temporary files.
    """
    if re.fullmatch(r"[A-Za-z0-9._/+-]+", str(folder)):
        return folder
    remove_link(folder)
    link = _link(folder)
    link.symlink_to(folder)
    return link


def remove_link(folder: Path) -> None:
    """Removes the link that `plain_path` made, if it made one."""
    link = _link(folder)
    if link.is_symlink() and link.lstat().st_uid == os.getuid():
        link.unlink()


def _link(folder: Path) -> Path:
    return Path(tempfile.gettempdir(), f"labkit-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}")


def _free_ports(count: int) -> list[int]:
    """Returns ports on which nobody listens; whoever takes one of them first has it."""
    free = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        free.append(port)
        if len(free) == count:
            return free
    raise OSError("no free port on loopback")


def _config(username: str, password: Secret, management_port: int, settings: dict[str, Any]) -> str:
    """Returns advanced.config: Erlang terms need no schema to be read, which saves a second of the start."""
    rabbit = {"default_user": username, "default_pass": password.reveal(), "disk_free_limit": DISK_FREE_BYTES,
              "dead_letter_worker_publisher_confirm_timeout": DEAD_LETTER_AGAIN_MS, **settings}
    terms = ["{vm_memory_high_watermark,{absolute,%d}}" % MEMORY_BYTES, "{log,[{console,[{enabled,true},{level,warning}]}]}",
             *(f"{{{name},{_term(value)}}}" for name, value in rabbit.items())]
    return ("[{rabbit,[%s]},\n {rabbitmq_management,[{tcp_config,[{port,%d},{ip,\"127.0.0.1\"}]}]}].\n"
            % (",\n  ".join(terms), management_port))


def _term(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'<<"{value}">>' if isinstance(value, str) else str(value)


def _inetrc() -> str:
    """Names are looked up in this file only: the node asks for its own host's name, and a slow resolver stalls it 5 s."""
    names = ",".join(f'"{name}"' for name in dict.fromkeys(("localhost", socket.gethostname())))
    return f"{{lookup,[file]}}.\n{{host,{{127,0,0,1}},[{names}]}}.\n"


def _write(path: Path, text: str, mode: int = 0o600) -> None:
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, mode)) as out:
        out.write(text)
