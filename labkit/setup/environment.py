"""The environment: `.venv` with the packages of requirements.txt, made or mended where it is not complete.

A stamp in it says which requirements it holds, and is written last. While it is being made the stamp says "unfinished":
whoever finds that knows that an earlier set-up was cut off, in the middle of any file, and makes it anew. pip keeps what it
downloaded in its own cache, so that costs seconds and no second download.
"""
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

from labkit import paths
from labkit.setup import SetupError
from labkit.setup.progress import run, say

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = ROOT / "requirements.txt"
STAMP = VENV / "labkit-stamp"
UNFINISHED = "unfinished"
NEEDED_MB = 1000  #: free disk that the environment needs

#: JupyterLab asks for news on its first start, and would look for updates; here it does neither.
SETTINGS = VENV / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
QUIET = '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}\n'


def ready() -> bool:
    """Say whether the environment is complete and belongs to this requirements.txt. Read-only."""
    return os.access(PYTHON, os.X_OK) and _stamp() == _wanted()


def ensure() -> None:
    """Make or complete the environment. One set-up at a time works on it; a second one waits for the first."""
    if ready():
        return
    with _alone() as lock:
        if ready():
            return
        if _stamp() == UNFINISHED or not _has_pip():
            _make(lock)
        STAMP.write_text(UNFINISHED)
        environ = {**os.environ, "PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
        pip = [PYTHON, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
        run("Installing the Python packages", [*pip, "-r", REQUIREMENTS], setup_log(), env=environ, pass_fds=[lock],
            now="look at your connection to the package index, then run the same command again; it goes on from here")
        for folder in _site_packages():
            folder.joinpath("at-least-once.pth").write_text(f"{ROOT}\n", encoding="utf-8")
        SETTINGS.parent.mkdir(parents=True, exist_ok=True)
        SETTINGS.write_text(QUIET)
        STAMP.write_text(_wanted())


def enter() -> None:
    """Go on in the environment's Python, as the same process; at once when this is it already."""
    if not inside():
        os.execv(PYTHON, [str(PYTHON), "-m", "labkit", *sys.argv[1:]])


def inside() -> bool:
    """Say whether this is the environment's Python."""
    return VENV.exists() and os.path.samefile(sys.prefix, VENV)


def can_make_venv() -> bool:
    """Say whether this Python can make an environment with pip in it (Debian's cannot, without a package of its own)."""
    return importlib.util.find_spec("ensurepip") is not None


def setup_log() -> Path:
    """The file that holds what pip and the package manager printed."""
    return paths.state() / "setup.log"


def _make(lock: int) -> None:
    if (free_mb := shutil.disk_usage(ROOT).free // 1_000_000) < NEEDED_MB:
        raise SetupError(f"The disk of {ROOT} has {free_mb} MB left.", f"the environment needs {NEEDED_MB} MB",
                         "make room, then run the same command again")
    if VENV.exists():
        say("An earlier set-up was cut off; the environment is made anew.")
        shutil.rmtree(VENV)
    VENV.mkdir()
    STAMP.write_text(UNFINISHED)
    base = getattr(sys, "_base_executable", sys.executable)  # not the Python of an environment that is about to change
    run("Making the Python environment", [base, "-m", "venv", VENV], setup_log(), pass_fds=[lock],
        now="run the same command again; if it fails again, try another Python 3.11 or newer")


@contextmanager
def _alone():
    """Hold the set-up's lock. Its descriptor goes to pip too: a pip that outlives a killed set-up still holds it."""
    with open(paths.state() / "setup.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another set-up works on this folder; waiting for it …")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _stamp() -> str:
    try:
        return STAMP.read_text()
    except OSError:
        return ""


def _wanted() -> str:
    """What the stamp of a complete environment says: its requirements, and the place that its files point to."""
    return hashlib.sha256(REQUIREMENTS.read_bytes() + os.fsencode(ROOT)).hexdigest()


def _has_pip() -> bool:
    return os.access(PYTHON, os.X_OK) and any(folder.joinpath("pip").is_dir() for folder in _site_packages())


def _site_packages() -> list[Path]:
    return list(VENV.glob("lib/python3*/site-packages"))
