"""The rabbitmq-server programs of this machine: find one, tell its version, see whether it can be run. Nothing is started."""

import os
import shutil
import sys
from pathlib import Path

from labkit.errors import BrokerError

#: where Erlang and RabbitMQ are when PATH does not say, as in a Jupyter that was started from a desktop
MORE_PATH = ("/opt/homebrew/bin", "/usr/local/bin", "/home/linuxbrew/.linuxbrew/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
#: where the folders of a server state its version: packaged, unpacked, Homebrew, a root folder beside a wrapper
_VERSIONS = ("../lib/rabbitmq_server-[0-9]*", "../plugins/rabbit-[0-9]*", "../../rabbitmq_server-[0-9]*", "root/usr/lib/rabbitmq/lib/rabbitmq_server-[0-9]*")


def installed() -> Path | None:
    """Returns the rabbitmq-server of this machine that would be used, or None.

    Not /usr/sbin/rabbitmq-server of Debian and Fedora: that wrapper is for the system service, and demands root.
    """
    conda = [Path(prefix, "bin") for prefix in (os.environ.get("CONDA_PREFIX"), sys.prefix) if prefix]
    brew = [Path(prefix, "opt/rabbitmq/sbin") for prefix in (os.environ.get("HOMEBREW_PREFIX"), "/opt/homebrew", "/usr/local",
                                                             "/home/linuxbrew/.linuxbrew") if prefix]
    for folder in (*conda, Path("/usr/lib/rabbitmq/bin"), *brew, *map(Path, search_path().split(os.pathsep))):
        server = folder / "rabbitmq-server"
        if server.is_file() and os.access(server, os.X_OK) and not _demands_root(server):
            return server
    return None


def version_of(server: str | os.PathLike) -> str:
    """Returns the version of a server, such as "4.3.6", or "" where the folders around it do not state it."""
    around = Path(server).resolve().parent
    found = next((path for pattern in _VERSIONS for path in sorted(around.glob(pattern))), None)
    return found.name.rpartition("-")[2].removesuffix(".ez") if found else ""


def usable(server: Path) -> None:
    """Raises BrokerError unless the server is a program that may be run."""
    if not server.is_file():
        raise BrokerError(f"There is no {server}.", "LABKIT_RABBITMQ_SERVER, or `server`, names a file that is not there",
                          "name a rabbitmq-server, or unset LABKIT_RABBITMQ_SERVER to use the installed one")
    if not os.access(server, os.X_OK):
        raise BrokerError(f"{server} cannot be run.", "the file is not executable for this user", f"chmod +x {server}")
    if _demands_root(server):
        raise BrokerError(f"{server} cannot be run.", "it is the wrapper for the system service, which demands root",
                          "name the server itself, such as /usr/lib/rabbitmq/bin/rabbitmq-server, or unset LABKIT_RABBITMQ_SERVER")


def search_path(server: str | os.PathLike = "") -> str:
    """Returns the PATH on which a server finds its Erlang."""
    return os.pathsep.join(dict.fromkeys(filter(None, (*os.environ.get("PATH", "").split(os.pathsep), os.path.dirname(server), *MORE_PATH))))


def erlang(server: str | os.PathLike, program: str = "erl") -> Path | None:
    """Returns a program of the Erlang on which this server would run, or None."""
    path = search_path(server)
    if found := shutil.which(program, path=path):
        return Path(found)
    erl = shutil.which("erl", path=path)  # a packager may link only this one into PATH
    beside = sorted(Path(erl).resolve().parents[1].glob(f"**/erts-*/bin/{program}")) if erl else []
    return beside[-1] if beside else None


def _demands_root(server: Path) -> bool:
    if server.resolve().name == "rabbitmq-script-wrapper":
        return True
    with open(server, "rb") as file:
        return b"Only root or rabbitmq" in file.read(1 << 14)
