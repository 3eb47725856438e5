"""labkit: run a message handler on a real RabbitMQ, kill it anywhere, and see what becomes of every effect.

Everything is imported when it is first used, so that the set-up command runs on a bare Python.
"""

import importlib
from typing import Any

_PUBLIC = {
    # the lab and what it takes
    "Lab": "lab", "Message": "message",
    # what is tried again, and what is not
    "RetryPolicy": "retry", "classify": "retry", "BrokenRule": "retry", "BusinessOutcome": "retry", "UnknownSchema": "retry",
    # the faults
    "crash": "faults", "hang": "faults", "lose": "faults", "fail": "faults",
    # what it gives back
    "Run": "result", "Watch": "watch", "Production": "production", "Sweep": "sweep", "STEPS": "steps", "STATUSES": "result", "OUTCOMES": "production",
    # what joins runs
    "hops": "joined",
    # a relay for `Lab.produce`
    "publish_outbox": "outbox",
    # a look at queues before they are declared
    "check_topology": "topology_check",
    # the errors
    "LabError": "errors", "BrokerError": "errors", "HandlerError": "errors", "LedgerError": "errors", "PlanError": "errors", "WorkerError": "errors",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"labkit.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
