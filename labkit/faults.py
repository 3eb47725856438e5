"""The faults: what is planned to happen at which step. Plain data; the supervisor holds and fires them.

    crash.before("ack")      crash.after("ledger.record", message=3)      hang.at("ack", seconds=2)
    lose.ack(message=2)      lose.publish()      lose.confirm()      fail("ledger.record", TimeoutError("slow"), times=2)
"""

import difflib
import re
from dataclasses import dataclass
from typing import Any

from labkit.errors import PlanError
from labkit.steps import ACK, AFTER, BEFORE, CONFIRM, PUBLISH, STEPS

WORKER, PRODUCER, RELAY = ROLES = "worker", "producer", "relay"              #: what a process is there for


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault: what (`kind`), where (`step`, `phase`), and for which delivery.

    message:  1-based position among the published messages, or a message id; None is the first that gets there
    attempt:  which handing-over of that message; None is any
    worker:   the worker's number; or what it is, such as "relay", or "producer 2"; None is any
    nth:      1 is the first time that the step is passed for the message
    times:    how often it may fire
    error:    what `fail` raises; seconds: how long `hang` lasts, None until the run ends
    what:     what `lose` loses: "ack", "publish" or "confirm"
    """

    kind: str
    step: str
    phase: str
    message: int | str | None = None
    attempt: int | None = 1
    worker: int | str | None = None
    nth: int = 1
    times: int = 1
    error: BaseException | None = None
    seconds: float | None = None
    what: str = ""

    def __post_init__(self):
        if self.step not in STEPS:
            near = difflib.get_close_matches(str(self.step), STEPS, 1)
            raise PlanError(f"There is no step {self.step!r}.", f"perhaps {near[0]!r} is meant" if near else "a misspelt name",
                            "The steps are: " + ", ".join(STEPS) + ".")
        for name, least in (("nth", 1), ("times", 1), ("attempt", 1), ("worker", 1), ("message", 1)):
            value = getattr(self, name)
            if name == "worker" and isinstance(value, str):
                if not re.fullmatch(f"({'|'.join(ROLES)})( [1-9][0-9]*)?", value):
                    raise PlanError(f"{self}: worker is {value!r}.", "it is a number, or one of " + ", ".join(ROLES), 'Use worker="relay", or worker="producer 2".')
            elif value is not None and not isinstance(value, (int, str) if name == "message" else int):
                raise PlanError(f"{self}: {name} is {value!r}.", "it must be a whole number" + " or an id" * (name == "message"), f"Use {name}=1.")
            if isinstance(value, int) and value < least:
                raise PlanError(f"{self}: {name} is {value}.", "counting starts at 1", f"Use {name}=1 or more.")

        if self.seconds is not None and not (isinstance(self.seconds, (int, float)) and self.seconds > 0):
            raise PlanError(f"{self}: seconds is {self.seconds!r}.", "it must be a positive number", "Use seconds=1, or leave it out.")

    def __str__(self):
        given = [repr(self.step)] if self.kind != "lose" else []
        given += [repr(self.error)] if self.error is not None else []
        default_attempt = None if self.kind == "fail" or self.what in (PUBLISH, CONFIRM) else 1
        for name, default in (("message", None), ("attempt", default_attempt), ("worker", None), ("nth", 1), ("times", 1), ("seconds", None)):
            if getattr(self, name) != default:
                given.append(f"{name}={getattr(self, name)!r}")
        verb = {"crash": f"crash.{self.phase}", "hang": "hang.at", "lose": f"lose.{self.what}", "fail": "fail"}[self.kind]
        return f"{verb}({', '.join(given)})"

    __repr__ = __str__

    def concerns(self, passing: dict[str, Any]) -> bool:
        """Tells whether a gate being passed is the planned one, leaving aside nth and times."""
        return ((self.step, self.phase) == (passing["step"], passing["phase"])
                and self.message in (None, passing["position"], passing["message_id"])
                and (self.attempt is None or passing["attempt"] in (None, self.attempt))       # not known yet before receive
                and self.worker in (None, passing["worker"], passing["role"], passing["lane"]))


class crash:
    """The worker process is ended by SIGKILL at the step."""

    @staticmethod
    def before(step: str, message=None, attempt: int | None = 1, worker=None, nth: int = 1, times: int = 1) -> Fault:
        """Plans a SIGKILL before the step is done."""
        return Fault("crash", step, BEFORE, message, attempt, worker, nth, times)

    @staticmethod
    def after(step: str, message=None, attempt: int | None = 1, worker=None, nth: int = 1, times: int = 1) -> Fault:
        """Plans a SIGKILL after the step is done."""
        return Fault("crash", step, AFTER, message, attempt, worker, nth, times)


class hang:
    """The worker process is frozen by SIGSTOP at the step."""

    @staticmethod
    def at(step: str, message=None, attempt: int | None = 1, worker=None, nth: int = 1, times: int = 1,
           seconds: float | None = None) -> Fault:
        """Plans a SIGSTOP before the step is done, for `seconds`, or until the run ends."""
        return Fault("hang", step, BEFORE, message, attempt, worker, nth, times, seconds=seconds)


class lose:
    """Something sent is lost on the way: a TCP relay between worker and broker cuts the connection there."""

    @staticmethod
    def ack(message=None, attempt: int | None = 1, worker=None, nth: int = 1, times: int = 1) -> Fault:
        """Plans that the ack leaves the worker and never reaches the broker."""
        return Fault("lose", ACK, BEFORE, message, attempt, worker, nth, times, what=ACK)

    @staticmethod
    def publish(message: str | None = None, worker=None, nth: int = 1, times: int = 1) -> Fault:
        """Plans that a message leaves who publishes it and never reaches the broker.

        message: the id of what is published, in a producer; in a handler the message that is handled, as everywhere
        """
        return Fault("lose", PUBLISH, BEFORE, message, None, worker, nth, times, what=PUBLISH)

    @staticmethod
    def confirm(message: str | None = None, worker=None, nth: int = 1, times: int = 1) -> Fault:
        """Plans that the broker takes a published message, and that its confirm never reaches who published it.

        message: the id of what is published, in a producer; in a handler the message that is handled, as everywhere
        """
        return Fault("lose", PUBLISH, BEFORE, message, None, worker, nth, times, what=CONFIRM)


def fail(step: str, error: BaseException | type[BaseException], times: int = 1, message=None,
         attempt: int | None = None, worker=None, nth: int = 1) -> Fault:
    """Plans that the step raises `error` instead of being done, `times` times."""
    error = error() if isinstance(error, type) else error
    if not isinstance(error, BaseException):
        raise PlanError(f"fail({step!r}, …) needs an error to raise.", f"it was given {error!r}",
                        'Write fail("ledger.record", TimeoutError("the database is slow")).')
    return Fault("fail", step, BEFORE, message, attempt, worker, nth, times, error)
