"""The sweep: one run for each crash point, before and after each step, side by side."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from labkit.faults import RELAY, WORKER, Fault, crash
from labkit.palette import WORST_FIRST
from labkit.result import Run
from labkit.steps import BEFORE, RECEIVE, STEPS

Point = tuple[str, str | None, int]                   # a step, who takes it (None for a worker), and at which attempt


@dataclass(frozen=True)
class SweepRow:
    """One crash point and what came of it. `faults` is empty for the run without a crash."""

    faults: tuple[Fault, ...]
    run: Run

    @property
    def point(self) -> str:
        """The crash point in words: "after ledger.record", "before ack of attempt 2", "after ledger.record, then before ack", or "relay before ledger.commit"."""
        words = [f"{fault.worker} " * (fault.worker == RELAY) + f"{fault.phase} {fault.step}" for fault in self.faults] or ["no crash"]
        attempt = (self.faults[0].attempt or self.faults[0].nth) if self.faults else 1
        return ", then ".join([words[0] + f" of attempt {attempt}" * (attempt > 1), *words[1:]])

    @property
    def status(self) -> str:
        """The worst status among the keys, or "unknown" when a planned crash did not fire."""
        if not all(self.run.facts.fired):
            return "unknown"
        return next((status for status in WORST_FIRST if self.run.counts.get(status)), "nothing")

    @property
    def numbers(self) -> list[int | str]:
        """What the run counts, as its SWEPT names it; "?" where that could not be asked."""
        facts = self.run.facts
        unasked = ["effects", "orders"] * (facts.effects is None) + ["events"] * (facts.where is None)
        return ["?" if name in unasked else self.run.counts[name] for name in self.run.SWEPT]

    @property
    def charges(self) -> int | str:
        """The charges at the provider; "?" where that could not be asked."""
        return "?" if self.run.facts.charges is None else sum(self.run.facts.charges.values())

    @property
    def deliveries(self) -> int:
        return self.run.counts["deliveries"]

    @property
    def effects(self) -> int:
        return self.run.counts["effects"]

    @property
    def verdict(self) -> str:
        return self.run.verdict


class Sweep:
    """All crash points of one handler. The first row is the run without a crash."""

    def __init__(self, name: str, rows: list[SweepRow]):
        self.name, self.rows = name, rows

    @property
    def verdict(self) -> str:
        """"broken" if any row is, else "unknown" if any row is, or there is no crash point, else "holds"."""
        verdicts = {row.verdict for row in self.rows}
        found = next(verdict for verdict in ("broken", "unknown", "holds") if verdict in verdicts)
        return "unknown" if found == "holds" and len(self.rows) == 1 else found

    @property
    def why(self) -> str:
        """The reason for the verdict, with the crash point of the first row that shows it."""
        points = len(self.rows) - 1
        if self.verdict == "holds":
            return f"at each of {points} crash points, {self.rows[0].run.KEPT}"
        row = next((row for row in self.rows if row.verdict == self.verdict), None)
        if row is None:
            return "the run without a crash showed no step, so there was no crash point to try"
        bad = sum(row.verdict == self.verdict for row in self.rows[1:])
        return f"{row.point}: {row.run.why} ({bad} of {points} crash points are {self.verdict})"

    @property
    def charged(self) -> bool:
        """Tells whether the provider made charges."""
        return any(row.charges for row in self.rows)

    @property
    def counts(self) -> Mapping[str, int]:
        """Status -> crash points that end with it."""
        return {status: sum(row.status == status for row in self.rows[1:]) for status in self.rows[0].run.STATUSES}

    def plot(self, *others: "Sweep", ax=None):
        """Draws the map: this sweep and the others, a row each; each crash point a cell."""
        from labkit import plots
        return plots.sweep_map([self, *others], ax)

    def __repr__(self) -> str:
        from labkit import report
        return report.sweep_text(self)

    def _repr_html_(self) -> str:
        from labkit import report
        return report.sweep_html(self)


def all_points(run: Callable[..., Run], depth: int) -> list[SweepRow]:
    """Returns the rows of a sweep: run() is the run without a crash, and run(fault, …) one with these planned."""
    rows = [SweepRow((), run())]
    known = _points(rows[0].run)
    steps = {(step, role) for step, role, _ in known}
    for first in _crashes(known):
        rows.append(SweepRow((first,), run(first)))
        if depth > 1:
            recovery = [(step, role, attempt) for step, role, attempt in _points(rows[-1].run) if (step, role) not in steps]
            rows += [SweepRow((first, second), run(first, second)) for second in _crashes(recovery)]
    return rows


def _points(run: Run) -> list[Point]:
    """Returns the steps that were taken, the first attempt's first, each in the order of their first passing."""
    found, attempts = {}, {}                          # lane -> attempt under way
    for event in run.events:
        if event.name in STEPS and event.phase == BEFORE:
            role = event.lane.split()[0]
            if event.name == RECEIVE:                 # which attempt it is, is known when it has been logged
                attempts[event.message_id] = attempts.get(event.message_id, 0) + 1
            found[event.name, role if role != WORKER else None, event.attempt or attempts.get(event.message_id, 1)] = None
    return sorted(found, key=lambda point: point[2])


def _crashes(points: list[Point]) -> list[Fault]:
    """Returns a crash before and one after each point. The receive of a later attempt is known by its number only."""
    return [where(step, worker=role, **({"attempt": None, "nth": attempt} if step == RECEIVE and attempt > 1 else {"attempt": attempt}))
            for step, role, attempt in points for where in (crash.before, crash.after)]
