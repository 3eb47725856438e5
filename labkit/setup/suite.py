"""`test`: the whole suite by pytest, whose configuration, notebooks included, is in pyproject.toml."""
import os
import sys

from labkit.broker import node
from labkit.setup.environment import ROOT

SERVERS = "LABKIT_RABBITMQ_SERVERS"


def needs_installed_server() -> bool:
    """Say whether the servers to test on include the installed one: none is named, or an empty element stands for it."""
    return "" in os.environ.get(SERVERS, "").split(os.pathsep)


def test(arguments: list[str]) -> int:
    """Become pytest, so that its exit code is ours; `arguments` go to it as they are."""
    if needs_installed_server() and (installed := node.installed()):
        named = os.environ.get(SERVERS, "").split(os.pathsep)
        os.environ[SERVERS] = os.pathsep.join(server or str(installed) for server in named)
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
