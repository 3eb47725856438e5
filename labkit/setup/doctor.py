"""`doctor`: what is here, which broker would be used, what is wrong, and the command that mends it. Changes nothing."""
import platform
import re
import shutil
import sys
from importlib import metadata

from labkit import paths
from labkit.broker.commands import Check, checks
from labkit.setup import environment
from labkit.setup.progress import say
from labkit.setup.up import DEFAULT_PORT, free

NEEDED_MB = 500  #: free disk that nodes and runs need


def doctor() -> int:
    """Print one line a check, and a remedy below each that is wrong. Returns 1 if something is wrong, else 0."""
    found = [_python(), _environment(), *_packages(), *checks(), _disk(), _port()]
    width = max(len(check.name) for check in found)
    for check in found:
        say(f"{'ok   ' if check.ok else 'WRONG'}  {check.name:<{width}}  {check.found}")
        if not check.ok:
            say(f"       {'':<{width}}  mend: {check.remedy}")
    wrong = sum(not check.ok for check in found)
    say(f"\n{wrong} of {len(found)} checks found something wrong." if wrong else "\nAll is well.")
    return 1 if wrong else 0


def _python() -> Check:
    return Check("Python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}", "")


def _environment() -> Check:
    if environment.ready():
        return Check("environment", True, f"complete, in {environment.VENV}", "")
    state = "unfinished or older than requirements.txt" if environment.VENV.exists() else "not made yet"
    return Check("environment", False, state, "python3 -m labkit up")


def _packages() -> list[Check]:
    """The packages that requirements.txt names, where this is the environment's Python: elsewhere they say nothing."""
    if not environment.inside():
        return []
    found = []
    for name in re.findall(r"^[\w-]+", environment.REQUIREMENTS.read_text(), re.MULTILINE):
        try:
            found.append(Check(name, True, metadata.version(name), ""))
        except metadata.PackageNotFoundError:
            found.append(Check(name, False, "missing", f"{sys.executable} -m pip install -r {environment.REQUIREMENTS}"))
    return found


def _disk() -> Check:
    free_mb = shutil.disk_usage(paths.state()).free // 1_000_000
    return Check("disk", free_mb >= NEEDED_MB, f"{free_mb} MB free for nodes and runs in {paths.state()}",
                 f"make room for {NEEDED_MB} MB, or name another folder in LABKIT_STATE; python3 -m labkit clean removes old runs")


def _port() -> Check:
    taken = "" if free(DEFAULT_PORT) else " is taken; JupyterLab will take the next free one"
    return Check("JupyterLab's port", True, f"{DEFAULT_PORT}{taken or ' is free'}", "")
