"""The errors of labkit. Each message says what happened, the likely cause and the next step; none holds a password.

    LabError
    ├── BrokerError        no RabbitMQ can be found, started or reached
    ├── HandlerError       the learner's handler cannot be shipped to a worker
    ├── PlanError          a run, a fault or a message is described in a way that cannot be carried out
    └── WorkerError        the worker processes cannot be started or kept
"""


class LabError(Exception):
    """Raised when labkit cannot do what was asked; the message has three parts, one a line.

    what: what happened. why: the likely cause. now: the next step to take.
    """

    def __init__(self, what: str, why: str = "", now: str = ""):
        self.what, self.why, self.now = what, why, now
        super().__init__("\n".join(part for part in (what, why and f"Likely cause: {why}", now and f"What now: {now}") if part))


def told(error: BaseException) -> str:
    """Returns an error of any kind in one text, its type first; a learner's error may not be able to tell itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class BrokerError(LabError):
    """Raised when no RabbitMQ can be found, started or reached."""


class HandlerError(LabError):
    """Raised when the learner's handler cannot be shipped to a worker process."""


class PlanError(LabError):
    """Raised when a run, a fault or a message is described in a way that cannot be carried out."""


class WorkerError(LabError):
    """Raised when the worker processes cannot be started or kept."""
