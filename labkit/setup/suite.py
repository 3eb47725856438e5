"""`test`: the whole suite by pytest, whose configuration, notebooks included, is in pyproject.toml."""
import os
import sys

from labkit.setup.environment import ROOT


def needs_a_broker() -> bool:
    """Say whether the suite needs the broker that the lab finds by itself: where no servers are named, or one name is empty."""
    return "" in os.environ.get("LABKIT_RABBITMQ_SERVERS", "").split(os.pathsep)


def test(arguments: list[str]) -> int:
    """Become pytest, so that its exit code is ours; `arguments` go to it as they are."""
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
