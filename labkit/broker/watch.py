"""The end of a process that is not our child, as something to wait for: a pidfd on Linux, a kqueue elsewhere; and its birth."""

import os
import select
import selectors
import subprocess


class Exit:
    """Becomes readable, through `fileno`, when the process ends. Raises ProcessLookupError if there is no such process."""

    def __init__(self, pid: int):
        if hasattr(select, "kqueue"):
            self._queue = select.kqueue()
            event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
            try:
                self._queue.control([event], 0)
            except OSError:
                self._queue.close()
                raise
            self._fd = self._queue.fileno()
            self.close = self._queue.close
        else:
            self._fd = os.pidfd_open(pid)
            self.close = lambda: os.close(self._fd)

    def fileno(self) -> int:
        return self._fd


def has_ended(pid: int) -> bool:
    """Tells whether a process has ended, be it reaped or not."""
    try:
        watched = Exit(pid)
    except ProcessLookupError:
        return True
    with selectors.DefaultSelector() as selector:
        selector.register(watched, selectors.EVENT_READ)
        ended = bool(selector.select(0))
    watched.close()
    return ended


def born(pid: int) -> str | None:
    """Returns when a process began, in the system's own words, which tell it from a later one of the same number; or None."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:                                   # not Linux, or none of our business
        told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C", "TZ": "UTC"})
        return told.stdout.strip() or None
