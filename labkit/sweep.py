"""The sweep: one run for each crash point, before and after each step, side by side."""

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.faults import RELAY, Fault
from labkit.palette import WORST_FIRST
from labkit.result import Run


@dataclass(frozen=True)
class SweepRow:
    """One crash point and what came of it. `faults` is empty for the run without a crash."""

    faults: tuple[Fault, ...]
    run: Run

    @property
    def point(self) -> str:
        """The crash point in words: "after ledger.record", "after ledger.record, then before ack", or "relay before ledger.commit"."""
        return ", then ".join(f"{fault.worker} " * (fault.worker == RELAY) + f"{fault.phase} {fault.step}" for fault in self.faults) or "no crash"

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
