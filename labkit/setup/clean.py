"""`clean`: stop the node, and remove runs, data and the node's folder. The environment and the notebooks stay."""
import shutil
import sys

from labkit import paths
from labkit.broker import commands
from labkit.setup import SetupError
from labkit.setup.progress import say


def clean(yes: bool = False) -> int:
    """Ask, unless `yes`, and remove everything in the state folder. Returns 0."""
    state = paths.state()
    say(f"To be removed: the private RabbitMQ node, its data, and all saved runs, in {state}")
    if not yes:
        if not (sys.stdin and sys.stdin.isatty()):
            raise SetupError("Nothing was removed.", "there is no terminal to ask on", "add --yes")
        if input("Remove them? [y/N] ").strip().lower() not in ("y", "yes"):
            say("Nothing was removed.")
            return 0
    commands.main(["stop"])
    shutil.rmtree(state)
    say("Removed.")
    return 0
