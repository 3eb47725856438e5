"""Where labkit keeps its nodes and runs: one folder of the checkout, or one of the user's where that cannot be written.

LABKIT_STATE names another folder. Nothing here depends on HOME: it may be missing, or point to a place that is not ours.
"""

import hashlib
import os
import tempfile
from pathlib import Path

from labkit.errors import LabError

_ROOT = Path(__file__).resolve().parents[1]


class StateError(LabError):
    """Raised when no folder can be written for nodes and runs."""


def state() -> Path:
    """Returns the folder for nodes and runs, made where it is missing and open to its owner only.

    The first of these that can be written: LABKIT_STATE (and nothing else if it is set), `.labkit` of the checkout,
    the user's state folder, a folder of this user among the temporary ones. Raises StateError when there is none.
    """
    if named := os.environ.get("LABKIT_STATE"):
        candidates = [Path(named).absolute()]
    else:
        candidates = _candidates()
    for folder in candidates:
        if _ours(folder):
            return folder
    raise StateError(f"labkit has no folder to keep its node and its runs in; tried: {', '.join(map(str, candidates))}",
                     "they are read-only, belong to another user, or the disk is full",
                     "name a folder of your own, for example: export LABKIT_STATE=/path/to/a/folder")


def runs() -> Path:
    """Returns the folder for the ledgers of runs, made where it is missing; a lab removes its own at its end."""
    folder = state() / "runs"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _candidates() -> list[Path]:
    here = [_ROOT / ".labkit"] if (_ROOT / "pyproject.toml").exists() else []  # not beside an installed package
    name = hashlib.sha256(os.fsencode(_ROOT)).hexdigest()[:12]
    users = os.environ.get("XDG_STATE_HOME") or (os.environ.get("HOME") and os.path.join(os.environ["HOME"], ".local/state"))
    return [*here, *([Path(users, "labkit", name)] if users else []), Path(tempfile.gettempdir(), f"labkit-{os.getuid()}", name)]


def _ours(folder: Path) -> bool:
    """Makes the folder if need be, and tells whether it, and where we made it its parent, is ours and can be written."""
    try:
        if not folder.parent.exists():
            folder.parent.mkdir(mode=0o700, parents=True)
        if folder.parent.name == f"labkit-{os.getuid()}" and not _private(folder.parent):
            return False  # somebody else made it: /tmp is everybody's
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return _private(folder)
    except OSError:
        return False


def _private(folder: Path) -> bool:
    """Closes a folder of ours to others; tells whether it is ours."""
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid():
        return False
    folder.chmod(0o700)
    return True
