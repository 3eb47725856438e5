"""Who made a schema, written beside it: so that what a living lab still needs is told from what a dead one left."""

import json
import os
import socket
import time

from labkit.broker.watch import born, has_ended

_DAY_S = 86400                                        # what was made on another machine is left alone for so long


def sign() -> str:
    """Returns this process in words that another one can judge."""
    return json.dumps({"lab": socket.gethostname(), "process": os.getpid(), "born": born(os.getpid()), "made": int(time.time())})


def is_gone(signed: str | None) -> bool:
    """Tells whether the process that signed has ended. What nobody signed is somebody else's, whose end is not known."""
    try:
        owner = json.loads(signed or "")
        host, process, since, made = (owner[name] for name in ("lab", "process", "born", "made"))
    except (ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname():
        return time.time() - made > _DAY_S
    return has_ended(process) or born(process) not in (since, None)
