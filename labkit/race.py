"""The race: two workers hold copies of one message, and every order of their steps is tried, one run each.

The search is dynamic: which orders there are shows only while they run, because a worker that waits for the other's lock
cannot go. Each run repeats a beginning and then takes the next turn that was not taken before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from labkit import steps
from labkit.errors import HandlerError
from labkit.result import STATUSES, Run
from labkit.table import plain

#: (step, outcome) -> what the worker did, in words; None is any other outcome
_TOLD = {
    (steps.RECEIVE, None): "receives",
    (steps.LEDGER_FIND, "nothing"): "finds nothing", (steps.LEDGER_FIND, "found"): "finds the effect",
    (steps.LEDGER_RECORD, None): "records",
    (steps.LEDGER_RECORD_ONCE, "recorded"): "records", (steps.LEDGER_RECORD_ONCE, "duplicate"): "finds a duplicate",
    (steps.LEDGER_RECORD_ONCE, "conflict"): "finds a conflict",
    (steps.STATUS_MOVE, "moved"): "moves the status", (steps.STATUS_MOVE, None): "does not move the status",
    (steps.LEDGER_REMEMBER, "new"): "remembers the message", (steps.LEDGER_REMEMBER, "duplicate"): "remembered it already",
    (steps.LEDGER_BEGIN, None): "begins", (steps.LEDGER_COMMIT, None): "commits", (steps.LEDGER_ROLLBACK, None): "rolls back",
    (steps.LEDGER_EXECUTE, None): "runs its statement",
    (steps.OUTBOX_ADD, "duplicate"): "finds the event in the outbox", (steps.OUTBOX_ADD, None): "adds an event",
    (steps.OUTBOX_READ, None): "reads the outbox", (steps.OUTBOX_MARK, None): "marks the event",
    (steps.PROVIDER_CHARGE, None): "charges",
    (steps.RETRY_PUBLISH, "confirmed"): "publishes again", (steps.RETRY_PUBLISH, None): "has no confirm for what it publishes again",
    (steps.TERMINAL_RECORD, None): "records it for a person",
    (steps.PUBLISH, None): "publishes", (steps.CONFIRM, "confirmed"): "has its confirm", (steps.CONFIRM, None): "has no confirm",
    (steps.ACK, None): "acks", (steps.NACK, None): "nacks", (steps.REJECT, None): "rejects",
}


class Schedule:
    """One order of steps and the run that followed it. `order`: the worker of each turn, by number."""

    def __init__(self, run: Run, again: Callable[[Sequence[int]], Run]):
        self.run, self.order, self._again = run, tuple(goes for _, goes in run.facts.choices), again

    @property
    def told(self) -> list[str]:
        """The steps in words, such as "A finds nothing", without the handing-over and the answer."""
        return [words for name, words in _tell(self.run) if name not in (steps.RECEIVE, *steps.ANSWERS)]

    @property
    def status(self) -> str:
        """Where the effect key stands at the end."""
        return next(iter(self.run.statuses.values()))

    def replay(self) -> "Schedule":
        """Runs exactly this order again."""
        return Schedule(self._again(self.order), self._again)

    def plot(self, ax=None):
        """Draws the schedule as a trail, a lane for each worker."""
        return self.run.trail(next(iter(self.run.statuses))).plot(ax)

    def __repr__(self) -> str:
        return f"{self.run.verdict}: {' · '.join(self.told)}"


class Race:
    """All schedules of one handler, tried when it is made. `tried` of `total`; total is None when the search was cut off."""

    def __init__(self, name: str, run: Callable[[Sequence[int]], Run], limit: int):
        """run(order) carries out one schedule: the worker of each turn, as far as the order goes."""
        self.name = name
        self.schedules: list[Schedule] = []
        complete = self._search(run, limit)
        self.tried, self.total = len(self.schedules), len(self.schedules) if complete else None

    @property
    def first_broken(self) -> Schedule | None:
        """The first schedule that breaks the promise, or None."""
        return next((schedule for schedule in self.schedules if schedule.run.verdict == "broken"), None)

    @property
    def verdict(self) -> str:
        """"broken" if a schedule is; "unknown" if one is, or the search was cut off; else "holds"."""
        verdicts = {schedule.run.verdict for schedule in self.schedules}
        return "broken" if "broken" in verdicts else "unknown" if "unknown" in verdicts or self.total is None else "holds"

    @property
    def why(self) -> str:
        """The reason for the verdict, in one sentence."""
        bad = sum(schedule.run.verdict == "broken" for schedule in self.schedules)
        if bad:
            return f"{' · '.join(self.first_broken.told)}: {self.first_broken.run.why} ({bad} of {self.tried} schedules are broken)"
        if unknown := next((schedule for schedule in self.schedules if schedule.run.verdict == "unknown"), None):
            return f"{' · '.join(unknown.told)}: {unknown.run.why}"
        if self.total is None:
            return f"none of the {self.tried} schedules that were tried is broken, but there are more"
        return f"in each of {self.total} schedules, every effect is accounted for"

    @property
    def counts(self) -> Mapping[str, int]:
        """Status -> schedules that end with it."""
        return {status: sum(schedule.status == status for schedule in self.schedules) for status in STATUSES}

    def plot(self, ax=None):
        """Draws the first schedule that breaks the promise, or else the last one that was tried."""
        return (self.first_broken or self.schedules[-1]).plot(ax)

    def __repr__(self) -> str:
        from labkit import report
        return report.race_text(self)

    def _repr_html_(self) -> str:
        from labkit import report
        return report.race_html(self)

    def _search(self, run: Callable[[Sequence[int]], Run], limit: int) -> bool:
        """Tries schedules, and tells whether these are all. Each repeats a beginning, and takes a turn that was not taken there."""
        beginning: tuple[int, ...] = ()
        untried: list[list[int]] = []                 # for each turn of the beginning: who has not gone there yet
        while len(self.schedules) < limit:
            latest = Schedule(run(beginning), run)
            if latest.order[:len(beginning)] != beginning:
                raise HandlerError("The handler did not take the same steps when the same order was repeated.",
                                   "it depends on chance, on the time, or on what an earlier run left", "Seed what is random, and run the race again.")
            choices = latest.run.facts.choices
            if not beginning or len(choices[len(beginning) - 1][0]) > 1:      # else that worker only waited, which changes nothing
                self.schedules.append(latest)
                untried += [[number for number in can if number != goes] for can, goes in choices[len(beginning):]]
            while untried and not untried[-1]:
                untried.pop()
            if not untried:
                return True
            beginning = (*latest.order[:len(untried) - 1], untried[-1].pop())
        return False


def _tell(run: Run) -> Iterator[tuple[str, str]]:
    for event in run.events:
        worker = chr(ord("A") + int(event.lane.split()[1]) - 1) if event.lane.startswith("worker") else ""
        if event.phase == steps.FAILED:
            yield event.name, f"{worker} fails: {plain(event.detail['error'])}"
        elif event.name == "waiting":
            yield event.name, f"{worker} waits for the lock"
        elif event.phase == steps.AFTER:
            yield event.name, f"{worker} {_TOLD.get((event.name, event.detail.get('outcome'))) or _TOLD[event.name, None]}"
