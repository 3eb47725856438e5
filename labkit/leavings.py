"""What a handler leaves behind in its process: a worker that carries any of it on does not serve another run.

A second run in the same process would else find a helper file as it was before it was edited, a set that was filled
already, or an alarm that goes off.
"""

import os
import signal
import sys
import threading
from typing import Any

from labkit.origin import is_learners


def state() -> dict[str, Any]:
    """Returns what a handler may change in its process, to be compared later."""
    return {"modules": set(sys.modules), "environment": dict(os.environ), "threads": threading.active_count(),
            "signals": [signal.getsignal(number) for number in signal.valid_signals()], "timer": signal.getitimer(signal.ITIMER_REAL),
            "recursion": sys.getrecursionlimit()}


def anything_since(before: dict[str, Any]) -> bool:
    """Tells whether something was left since then: a child, a thread, a timer, a setting, or a module of the learner's own."""
    now = state()
    new = [sys.modules[name] for name in now["modules"] - before["modules"]]
    return (_has_children() or {**now, "modules": None} != {**before, "modules": None}
            or any(is_learners(file) for module in new if (file := getattr(module, "__file__", None))))


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True
