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
_SHIPPED = "<dynamic-code>"                           # what cloudpickle writes in place of the file
_MOST_FRAMES = 10                                     # endless recursion has a thousand, all alike


def is_learners(file: str) -> bool:
    """Tells whether code in this file is the learner's: not labkit, not a library, not Python itself."""
    return not file.startswith("<frozen") and not os.path.realpath(file).startswith(_NOT_THE_LEARNERS)


def learner_frames(trace: TracebackType | None) -> list[Frame]:
    """Returns (file, line number, function) of frames in the learner's code: the innermost few, the innermost last."""
    found = [(code.co_filename, line, code.co_name) for code, line in
             ((frame.f_code, line) for frame, line in traceback.walk_tb(trace)) if is_learners(code.co_filename)]
    return found[-_MOST_FRAMES:]


def tell(frames: list[Frame], files: dict[str, str]) -> str:
    """Returns the innermost frame in words, "in remind: `shop.ledger.record(key)`", or "" where there is none.

    files: function name -> file, for functions that were shipped by value (`ship.files`).
    """
    if not frames:
        return ""
    file, line, function = frames[-1]
    source = linecache.getline(files.get(function, file) if file == _SHIPPED else file, line).strip()
    return f"in {function}: `{source}`" if source else f"in {function}, line {line}"


def from_dump(dump: str, files: dict[str, str]) -> str:
    """Returns the innermost learner's frame of a `faulthandler` dump in words, or ""."""
    found = re.findall(r'File "(.+?)", line (\d+) in (\S+)', dump)
    frames = [(file, int(line), function) for file, line, function in found if is_learners(file)]
    return tell(frames[:1], files)
