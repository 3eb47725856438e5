"""Picture 6, waves: the calls that reach a provider over time, so that many at once can be told from the same number spread out."""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from matplotlib.ticker import MaxNLocator

from labkit.errors import PlanError
from labkit.palette import LOOKS
from labkit.plots.picture import DELIVERIES, MUTED, chart, finish, head, styled
from labkit.table import count, plain

_WIDTH, _ROW, _BINS = 9, 1.5, 60                      # inches; bars in the width
_ANSWERED, _TURNED_AWAY = LOOKS["once"].colour, DELIVERIES


def waves(calls: Mapping[str, Sequence[Mapping[str, Any]]], within_ms: float = 100):
    """Draws one row for each name, on one scale: its calls (as `lab.provider.calls`) over time, those that were served and those that were not.

    within_ms: the title tells the most calls within so long
    """
    if not calls or not any(calls.values()):
        raise PlanError("There is no call to draw.", "nobody has called the provider", 'Give it named lists: plots.waves({"in step": lab.provider.calls}).')
    long_ms = max(call["at_ms"] - begin for begin, made in _begun(calls) for call in made)
    edges = numpy.linspace(0, max(long_ms, 1) * 1.02, _BINS + 1)
    rows = {name: _counted(begin, made, edges) for name, (begin, made) in zip(calls, _begun(calls))}
    tallest = {name: tallest_wave(made, within_ms) for name, made in calls.items()}
    title = f"The most calls within {within_ms:g} ms: " + ", ".join(f"{number} {plain(name)}" for name, number in tallest.items())
    with styled():
        lines = head(title, _WIDTH - 0.8)
        axes = chart(_WIDTH, 0.9 + _ROW * len(rows) + 0.2 * len(lines), len(rows), sharex=True, sharey=True, squeeze=False)[:, 0]
        axes[0].set_title("\n".join(lines), loc="left", size=10.5, weight="bold", pad=22, gid="title")
        for ax, (name, (served, away)) in zip(axes, rows.items()):
            ax.stairs(served + away, edges, fill=True, color=_TURNED_AWAY, alpha=0.55, gid="not served")
            ax.stairs(served, edges, fill=True, color=_ANSWERED, gid="served")
            ax.annotate(f"{plain(name)}: {count(int(served.sum()), 'call')} served, {int(away.sum()):,} not", (0, 1), (0, 4), xycoords="axes fraction", textcoords="offset points",
                        color=MUTED, size=8, weight="bold", gid="name")
            ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
            ax.set_ylabel("calls")
        axes[-1].set_xlabel("milliseconds since the first call")
    said = "; ".join(f"{plain(name)}: at most {tallest[name]} calls within {within_ms:g} ms, {int(served.sum())} served and {int(away.sum())} not" for name, (served, away) in rows.items())
    return finish(axes[0], None, f"Calls at the provider over time. {said}.")


def tallest_wave(calls: Sequence[Mapping[str, Any]], within_ms: float) -> int:
    """Returns the largest number of calls within any `within_ms`."""
    times = sorted(call["at_ms"] for call in calls)
    return max((bisect.bisect_left(times, first + within_ms) - at for at, first in enumerate(times)), default=0)


def _begun(calls: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[float, list[Mapping[str, Any]]]]:
    """Returns (time of the first call, the calls) of each name."""
    return [(min((call["at_ms"] for call in made), default=0.0), list(made)) for made in calls.values()]


def _counted(begin: float, made: list[Mapping[str, Any]], edges: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    times = numpy.array([call["at_ms"] - begin for call in made])
    served = numpy.array([call["status"] == 200 for call in made], dtype=bool)
    return numpy.histogram(times[served], edges)[0], numpy.histogram(times[~served], edges)[0]
