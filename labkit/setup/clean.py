"""`clean`: stop the node, and remove runs, data and the node's folder. The environment and the notebooks stay."""
import shutil
import sys

from labkit import paths
from labkit.broker import commands
from labkit.setup import SetupError
from labkit.setup.progress import say

OURS = ("nodes", "runs", "jupyter.log", "jupyter.token", "setup.log")  #: LABKIT_STATE may name a folder that holds more


def clean(yes: bool = False) -> int:
    """Ask, unless `yes`, and remove what labkit put into the state folder, and nothing else there. Returns 0."""
    state = paths.state()
    say(f"To be removed: the private RabbitMQ node, its data, and all runs kept in {state}")
    if not yes:
        if not (sys.stdin and sys.stdin.isatty()):
            raise SetupError("Nothing was removed.", "there is no terminal to ask on", "add --yes")
        if input("Remove them? [y/N] ").strip().lower() not in ("y", "yes"):
            say("Nothing was removed.")
            return 0
    commands.main(["stop"])
    for path in (state / name for name in OURS):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    say("Removed.")
    return 0
