"""What the system itself must provide: a RabbitMQ server, and on Debian the part of Python that makes environments.

Debian and Ubuntu (as root or with sudo) and Homebrew are installed from, after saying so and asking. On every other system
the learner gets the exact command.
"""
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from labkit.broker import Address, finding, node
from labkit.setup import SetupError, environment
from labkit.setup.progress import run, say

DEBIAN_SCRIPT = Path(__file__).with_name("debian.sh")

#: what installs RabbitMQ, by the program that a system installs with
COMMANDS = {
    "apt-get": "sudo apt-get install --no-install-recommends rabbitmq-server",
    "brew": "brew install rabbitmq",
    "dnf": "sudo dnf install rabbitmq-server",
    "pacman": "sudo pacman -S rabbitmq",
    "apk": "sudo apk add rabbitmq-server",
    "zypper": "sudo zypper install rabbitmq-server",
    "conda": "conda install -c conda-forge rabbitmq-server",
    "docker": "docker compose up -d rabbitmq",
}
EVERYWHERE = ("conda", "docker")


def ensure(yes: bool, broker: bool = True) -> None:
    """Install what is missing. `yes`: without asking. `broker`: whether a RabbitMQ server on this machine is needed.

    Raises SetupError with the command to type when it cannot, or may not, be installed from here.
    """
    venv = [] if environment.ready() or environment.can_make_venv() else [f"python3.{sys.version_info.minor}-venv"]
    server = ["rabbitmq-server"] if broker and not broker_available() else []
    if shutil.which("apt-get") and venv + server:
        _debian(venv + server, yes)
    elif shutil.which("brew") and server:
        _ask("rabbitmq (Homebrew)", yes, "brew install rabbitmq")
        run("Installing RabbitMQ by Homebrew", ["brew", "install", "rabbitmq"], environment.setup_log(), at_its_pace=True,
            now="brew doctor")
    elif venv:
        raise SetupError("This Python cannot make an environment: its module ensurepip is missing.",
                         "the system packages it apart", "install it, or use a Python from python.org")
    elif server:
        raise SetupError("No RabbitMQ is here, and labkit does not know how to install one on this system.", "", ways())
    if server and not broker_available():
        raise SetupError("RabbitMQ was installed, but its server cannot be found.", "", "python3 -m labkit doctor")


def broker_available() -> bool:
    """Say whether a broker can be had without installing anything: a named one, an installed one, or the compose service."""
    named = os.environ.get("LABKIT_AMQP_URL") or os.environ.get("LABKIT_RABBITMQ_SERVER")
    return bool(named or node.installed() or _speaks_amqp(finding.compose_address()))


def ways() -> str:
    """The commands that give this very system a RabbitMQ, one a line; the ones that go everywhere where no other is known."""
    known = [command for program, command in COMMANDS.items() if shutil.which(program)]
    return "\n  ".join(["one of these commands, then the same command again:", *(known or [COMMANDS[name] for name in EVERYWHERE])])


def _speaks_amqp(address: Address) -> bool:
    """Say whether a broker answers there. Without pika, which is not here before the environment is."""
    try:
        with socket.create_connection((address.host, address.port), timeout=2) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return connection.recv(1) == b"\x01"  # the frame in which a broker opens the talk
    except OSError:
        return False


def _debian(packages: list[str], yes: bool) -> None:
    command = f"sudo apt-get install --no-install-recommends {' '.join(packages)}"
    root = os.geteuid() == 0
    if not root and not shutil.which("sudo"):
        raise SetupError(f"These packages are missing: {' '.join(packages)}.", "you are not root, and sudo is not here",
                         f"as root: {command.removeprefix('sudo ')}")
    _ask(", ".join(packages), yes, command)
    if not root:
        _let_sudo_ask(command)
    run(f"Installing {', '.join(packages)}", [*([] if root else ["sudo", "-n"]), "sh", DEBIAN_SCRIPT, *packages],
        environment.setup_log(), at_its_pace=True, now=f"sudo apt-get update && {command}")


def _ask(what: str, yes: bool, command: str) -> None:
    say(f"To be installed from your system's packages: {what}. No system service will be started.")
    if yes or os.environ.get("CI"):
        return
    if not (sys.stdin and sys.stdin.isatty()):
        raise SetupError("Nothing was installed.", "there is no terminal to ask on", f"add --yes, or type: {command}")
    try:
        answer = input("Go on? [Y/n] ")
    except EOFError:
        answer = "n"
    if answer.strip().lower() not in ("", "y", "yes"):
        raise SetupError("Nothing was installed.", "you said no", f"{command}\nor another way:\n{ways()}")


def _let_sudo_ask(command: str) -> None:
    """Have sudo ask for the password now, before a progress line is drawn over its question."""
    if subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0:
        return
    if not (sys.stdin and sys.stdin.isatty()):
        raise SetupError("sudo wants a password.", "there is no terminal to ask on", command)
    if subprocess.run(["sudo", "-v"]).returncode:
        raise SetupError("sudo did not let us in.", "a wrong password, or you may not use it here", command)
