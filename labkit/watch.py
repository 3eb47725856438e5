"""Watching a run while it goes on: samples of its queue, taken by the controller thread and told to the thread that asked."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labkit import controller, table
from labkit.errors import PlanError
from labkit.live import Live
from labkit.plan import positive
from labkit.sampling import Sample, sampling
from labkit.table import count

_SHOWN = (("ready", "ready"), ("in flight", "in_flight"), ("oldest, ms", "oldest_ms"), ("arrivals a second", "arrivals_per_s"),
          ("services a second", "services_per_s"))
_COLUMNS = ("", "first", "most", "last")


@dataclass
class Watch:
    """What was seen of one run.

    name:     how a picture calls it
    samples:  one after the other, as `Sample`
    faults:   (milliseconds since the run began, what happened to a worker), for the axis of time
    settings: the arguments of `Lab.run` that shaped the run
    began_ms: when the first message was confirmed
    over:     the run ended while it was watched
    """

    name: str
    settings: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    began_ms: float = 0.0
    over: bool = False

    def plot(self, *others: Any, ax=None):
        """Draws the queue growth; with other watches or runs beside it, a column each, all on one scale."""
        from labkit import plots
        return plots.queue_growth(self, *others, ax=ax)

    @property
    def caption(self) -> str:
        """What was seen, in one line."""
        if not self.samples:
            return f"{self.name}: nothing was seen of it"
        return (f"{self.name}: {count(len(self.samples), 'sample')} in {(self.samples[-1].at_ms - self.samples[0].at_ms) / 1000:.1f} s, "
                + ("until the run was over" if self.over else "the run goes on"))

    def __repr__(self) -> str:
        return "\n".join([self.caption, *["\n" + table.text(_COLUMNS, self._rows())] * bool(self.samples)])

    def _repr_html_(self) -> str:
        shown = table.markup(self.caption, _COLUMNS, self._rows(), header="") if self.samples else table.escape(self.caption)
        return f'<div style="color: var(--jp-content-font-color1, inherit)">\n{shown}\n</div>'

    def _rows(self) -> list[list[Any]]:
        rows = []
        for words, name in _SHOWN:
            told = [round(value) for sample in self.samples if (value := getattr(sample, name)) is not None]
            rows.append([words, *([told[0], max(told), told[-1]] if told else ["?"] * 3)])
        return rows


def watch(live: Live, every_ms: float, for_s: float | None, on_sample: Callable[[Watch], Any] | None, name: str | None) -> Watch:
    """Returns what was seen of a run; see `Lab.watch`."""
    if not isinstance(live, Live):
        raise PlanError(f"There is nothing to watch in a {type(live).__name__}.", "only a run that is under way can be watched",
                        'Start one: live = lab.start(handler, messages, publish="while", rate=50).')
    positive("every_ms", every_ms, (int, float))
    positive("for_s", for_s, (int, float, type(None)))
    seen, told = Watch(name or live.plan.settings()["handler"], live.plan.settings()), queue.SimpleQueue()
    work = controller.Work(sampling(live, every_ms / 1000, for_s, told.put))
    try:
        while (news := told.get()) is not None:
            sample, faults, seen.began_ms, seen.over, last = news
            seen.samples.append(sample)
            seen.faults += faults
            if on_sample and (last or told.empty()):                     # who is slow is not told of those in between
                on_sample(seen)
    except BaseException:
        work.cancel()
        work.settle()
        raise
    work.wait()
    return seen
