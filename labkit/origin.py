"""Where in the learner's own code something happened: frames found in a worker, told with their source in the kernel."""

import linecache
import os
import re
import sysconfig
import traceback
from types import TracebackType

_NOT_THE_LEARNERS = tuple(os.path.realpath(path) + os.sep for path in
                          (os.path.dirname(__file__), *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))))

Frame = tuple[str, int, str]


def is_learners(file: str) -> bool:
    """Tells whether code in this file is the learner's: not labkit, not a library, not Python itself."""
    return not file.startswith("<frozen") and not os.path.realpath(file).startswith(_NOT_THE_LEARNERS)


def learner_frames(trace: TracebackType | None) -> list[Frame]:
    """Returns (file, line number, function) of each frame in the learner's code, the innermost last."""
    return [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(trace, limit=None) if is_learners(f.filename)]


def tell(frames: list[Frame], files: dict[str, str]) -> str:
    """Returns the innermost frame in words, "in remind: `shop.ledger.record(key)`", or "" where there is none.

    files: function name -> file, for functions that were shipped by value (`ship.files`).
    """
    if not frames:
        return ""
    file, line, function = frames[-1]
    source = linecache.getline(files.get(function, file), line).strip()
    return f"in {function}: `{source}`" if source else f"in {function}, line {line}"


def from_dump(dump: str, files: dict[str, str]) -> str:
    """Returns the innermost learner's frame of a `faulthandler` dump in words, or ""."""
    found = re.findall(r'File "(.+?)", line (\d+) in (\S+)', dump)
    frames = [(file, int(line), function) for file, line, function in found if is_learners(file)]
    return tell(frames[:1], files)
