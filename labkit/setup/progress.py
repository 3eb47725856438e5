"""Run a command that takes long, and show that it is alive: what it does and how long so far.

On a terminal one line is drawn again and again; in a log a plain line is written now and then. What the command itself
prints goes to a log file, whose last lines are shown when it fails.
"""
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from labkit.setup import SetupError

LIVE_S = 0.2  #: between two drawings of the live line
PLAIN_S = 15  #: between two plain lines in a log


def say(text: str = "") -> None:
    """Print one line at once; a terminal that was closed in the meantime is no reason to fail."""
    try:
        print(text, flush=True)
    except OSError:
        pass


def run(what: str, command: list, log: Path, *, now: str = "", env: dict | None = None, pass_fds=(),
        at_its_pace: bool = False) -> None:
    """Run `command` under the title `what`, its output appended to `log`.

    When we are interrupted the command is told to end; with `at_its_pace` only waited for, as befits a package manager.

    Raises SetupError with the last lines of the output, and `now` as the next step, when it ends with another code than 0.
    """
    line = _Line(what)
    with log.open("ab") as output:
        begin = output.tell()
        child = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=output,
                                 stderr=subprocess.STDOUT, env=env, pass_fds=pass_fds)
    with _ended(child, at_its_pace):
        while (code := _wait(child, line.every_s)) is None:
            line.show(_last(log, begin))
    if code:
        line.end("failed")
        said = "\n".join(f"    {text}" for text in _lines(log, begin)[-12:])
        raise SetupError(f"{what} failed (exit code {code}). Its last lines:\n{said}",
                         f"the lines above name it; the whole output is in {log}", now)
    line.end("done")


def span(seconds: float) -> str:
    """A duration as people say it: `7 s`, `2 min 05 s`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class _Line:
    def __init__(self, what: str):
        self.what, self.began = what, time.monotonic()
        self.live = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.every_s = LIVE_S if self.live else PLAIN_S
        if not self.live:
            say(f"{what} …")

    def show(self, detail: str) -> None:
        text = f"{self.what} … {span(time.monotonic() - self.began)}"
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self._draw(f"{text}  \033[2m{detail[:max(0, width - len(text) - 2)]}\033[0m")
        else:
            say(f"  {text}  {detail[:80]}")

    def end(self, word: str) -> None:
        text = f"{self.what}: {word} after {span(time.monotonic() - self.began)}"
        if self.live:
            self._draw(f"{text}\n")
        else:
            say(text)

    @staticmethod
    def _draw(text: str) -> None:
        try:
            sys.stdout.write(f"\r\033[K{text}")
            sys.stdout.flush()
        except OSError:
            pass


@contextmanager
def _ended(child: subprocess.Popen, at_its_pace: bool):
    """Leave no child behind, whatever interrupts the block."""
    try:
        yield
    except BaseException:
        if child.poll() is None and at_its_pace:
            say("\nInterrupted; waiting until no package is left half-way …")
        elif child.poll() is None:
            child.terminate()
        child.wait()
        raise


def _wait(child: subprocess.Popen, seconds: float) -> int | None:
    try:
        return child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _lines(log: Path, begin: int) -> list[str]:
    with log.open("rb") as output:
        output.seek(begin)
        text = output.read().decode(errors="replace").replace("\r", "\n")
    return [line.rstrip() for line in text.split("\n") if line.strip()]


def _last(log: Path, begin: int) -> str:
    lines = _lines(log, max(begin, log.stat().st_size - 2000))
    return lines[-1].strip() if lines else ""
