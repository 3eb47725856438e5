"""The curves of picture 3: of a run by its events, or of a run that was watched by its samples; both are drawn alike."""

from typing import Any

import numpy

from labkit.gauge import FAULTS, Gauge
from labkit.result import Run
from labkit.table import count, plain

_SAMPLES, _BINS = 600, 40


class Curves:
    """Over `at`, in milliseconds since the first message was confirmed: `ready`, `in_flight`, the `age` of the oldest, and the totals so far.

    told:   what `ready` counts
    totals: "confirmed", "settled", "delivered" -> so many up to then
    faults: (when, what)
    name, note, words: what it is a picture of, what is said below, and the same as a sentence for those who cannot see it
    sampled: the points are samples; else they are all that happened
    """

    def __init__(self, name: str, note: str, words: str, told: str, points: list[tuple], start_ms: float, faults: list[tuple[float, str]], sampled: bool):
        self.name, self.note, self.words, self.told, self.sampled = name, note, words, told, sampled
        points = points or [(start_ms, 0, 0, 0.0, 0, 0, 0)]
        self.at, self.ready, self.in_flight, self.age, *totals = numpy.array(points, dtype=float).T
        self.at = self.at - start_ms
        self.totals = dict(zip(("confirmed", "settled", "delivered"), totals))
        self.faults = [(max(at - start_ms, 0.0), name) for at, name in faults]

    @property
    def most(self) -> float:
        """The height of the tallest curve of messages."""
        return max(1.0, numpy.nanmax(numpy.append(self.ready, 0)), self.in_flight.max())

    @property
    def repeats(self) -> bool:
        """Tells whether much more was delivered than was settled, or is at work."""
        return self.totals["delivered"][-1] > 1.2 * self.totals["settled"][-1] + self.in_flight.max() + 1

    def rates(self, name: str) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Returns how many a second, bin by bin, and the edges of the bins in milliseconds."""
        span, upto = max(self.at[-1] - self.at[0], 1), self.totals[name]
        if self.sampled:                              # in step with the samples, or bins would hold now one and now two
            between = numpy.diff(self.at)
            wide = max(span / _BINS, 1.5 * numpy.median(between) if len(between) else 0)
            edges = _spaced(self.at, wide)
            before = numpy.append(upto[numpy.searchsorted(self.at, edges[:-1])], upto[-1])
        else:
            edges = numpy.linspace(self.at[0], self.at[0] + span, _BINS + 1)
            before = numpy.append(numpy.append(0, upto)[numpy.searchsorted(self.at, edges[:-1])], upto[-1])
        return numpy.diff(before) / numpy.diff(edges) * 1000, edges

    def thinned(self, *curves):
        """Returns the times and the curves, thinned to what can be seen; a step is kept where it was."""
        if len(self.at) <= _SAMPLES:
            return self.at, *curves
        chosen = numpy.searchsorted(self.at, numpy.linspace(self.at[0], self.at[-1], _SAMPLES), side="right") - 1
        return self.at[chosen], *[curve[chosen] for curve in curves]


def of(shown: Any) -> Curves:
    """Returns the curves of a run, or of a run that was watched."""
    return _of_run(shown) if isinstance(shown, Run) else _of_watch(shown)


def _of_run(run: Run) -> Curves:
    gauge, points, faults = Gauge(run.facts.settings), [], []
    for event in run.events:
        if event.name in FAULTS:
            faults.append((event.at_ms, event.name))
        if gauge.take(event) and gauge.arrivals:
            points.append((event.at_ms, gauge.waiting, gauge.in_flight, gauge.age_ms(event.at_ms), gauge.arrivals, gauge.services, gauge.deliveries))
    return Curves(plain(run.why, 300), "", f"{run.total}; {count(len(faults), 'fault')} on the axis of time. Verdict: {run.verdict}; {plain(run.why, 300)}.",
                    "ready" if run.facts.settings.get("prefetch", 1) == 1 else "ready, or prefetched and not begun", points,
                  points[0][0] if points else 0.0, faults, sampled=False)


def _of_watch(watch: Any) -> Curves:
    samples = list(watch.samples)
    points = [(sample.at_ms, float("nan") if sample.ready is None else sample.ready, sample.in_flight, sample.oldest_ms, sample.arrivals, sample.services,
               sample.deliveries) for sample in samples]
    most = max([0, *[sample.ready for sample in samples if sample.ready is not None]])
    note = f"at most {most:,} ready, the oldest {max([0, *[sample.oldest_ms for sample in samples]]) / 1000:.1f} s old"
    last = f", {samples[-1].arrivals:,} confirmed and {samples[-1].services:,} settled" if samples else ""
    return Curves(watch.name, note, f"{watch.caption}; {note}{last}; {count(len(watch.faults), 'fault')} on the axis of time.", "ready", points,
                  watch.began_ms, watch.faults, sampled=True)


def _spaced(at: numpy.ndarray, wide: float) -> numpy.ndarray:
    """Returns times out of `at`, its ends among them, each at least `wide` after the one before."""
    edges = [at[0]]
    for now in at[1:]:
        if now - edges[-1] >= wide and at[-1] - now >= wide:
            edges.append(now)
    return numpy.array([*edges, max(at[-1], at[0] + 1)])
