"""Files of our own: locks that end with their process, and waiting for one: a lock has no event, so the wait looks again."""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from labkit.errors import BrokerError

_LOOK_S = 0.02


def private(path: str, flags: int) -> int:
    """Opens a file for its owner only: `open(path, "w", opener=private)`."""
    return os.open(path, flags, 0o600)


def lock(file: IO | int) -> bool:
    """Takes the lock of an open file; false if somebody else has it. It ends when all copies of the descriptor are closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, seconds: float, whose: str):
    """Holds the lock of a file; raises BrokerError if `whose` is not done with it within so many seconds."""
    with open(path, "a", opener=private) as file:
        if not within(seconds, lambda: lock(file)):
            raise BrokerError(f"{whose} has not come to an end within {seconds:g} s.", "that process is frozen", f"end it; it holds {path}")
        yield


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Waits until the condition holds; false if it does not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
