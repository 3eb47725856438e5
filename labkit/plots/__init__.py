"""The pictures of runs and sweeps. Each takes `ax`: with matplotlib axes it draws there and returns them, else it returns a `Picture`."""

from labkit.palette import WORST_FIRST
from labkit.plots.cells import sweep_map
from labkit.plots.growth import queue_growth
from labkit.plots.kept import retention
from labkit.plots.lanes import trail
from labkit.plots.pairs import deliveries_and_effects
from labkit.plots.picture import Picture
from labkit.plots.waves import tallest_wave, waves
from labkit.result import Run

__all__ = ["Picture", "deliveries_and_effects", "queue_growth", "retention", "run", "sweep_map", "tallest_wave", "trail", "waves"]

_FEW_KEYS = 6


def run(run: Run, ax=None):
    """Draws a run: the trail of its most telling key where there are few keys, else deliveries against effects."""
    if not 0 < len(run.statuses) <= _FEW_KEYS:
        return deliveries_and_effects(run, ax)
    telling = min(run.statuses, key=lambda key: (WORST_FIRST.index(run.statuses[key]), *[-number for number in run.pair(key)]))
    return trail(run, telling, ax)
