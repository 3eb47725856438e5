"""The errors of labkit. Each message says what happened, the likely cause and the next step; none holds a password.

    LabError
    ├── BrokerError        no RabbitMQ can be found, started or reached
    ├── HandlerError       the learner's handler cannot be shipped to a worker, or does there what no handler may
    ├── LedgerError        the ledger is away: its database cannot be opened, reached or written
    │   └── LedgerLocked   another holds its lock
    ├── PlanError          a run, a fault or a message is described in a way that cannot be carried out
    └── WorkerError        the worker processes cannot be started or kept
"""


class LabError(Exception):
    """Raised when labkit cannot do what was asked; the message has three parts, one a line.

    what: what happened. why: the likely cause. now: the next step to take.
    """

    def __init__(self, what: str, why: str = "", now: str = ""):
        self.what, self.why, self.now = what, why, now
        super().__init__(what, why, now)

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.what, self.why and f"Likely cause: {self.why}", self.now and f"What now: {self.now}")))


def told(error: BaseException) -> str:
    """Returns an error of any kind in one text, its type first; a learner's error may not be able to tell itself."""
    if isinstance(error, LabError):
        return f"{type(error).__name__}: {error.what}" + (f" ({error.why})" if error.why else "")
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class BrokerError(LabError):
    """Raised when no RabbitMQ can be found, started or reached."""


class HandlerError(LabError):
    """Raised when the learner's handler cannot be shipped to a worker process, or does there what no handler may."""


class LedgerError(LabError):
    """Raised by a step of the ledger when its database is away: no effect can be checked or written."""


class LedgerLocked(LedgerError):
    """Raised when another worker held the lock of the ledger's database for too long."""

    def __init__(self, what: str = "The ledger is locked.", why: str = "another worker holds its lock",
                 now: str = "Keep transactions short, and do nothing slow inside one."):
        super().__init__(what, why, now)


class PlanError(LabError):
    """Raised when a run, a fault or a message is described in a way that cannot be carried out."""


class WorkerError(LabError):
    """Raised when the worker processes cannot be started or kept."""
