"""Picture 4, deliveries against effects: for each key a bar of deliveries upward and a bar of effects downward."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from labkit.palette import LOOKS
from labkit.plots.picture import DELIVERIES, INK, LINE, MUTED, finish, head, styled
from labkit.report import totals
from labkit.result import Run
from labkit.table import count, plain

_MOST_BARS, _MOST_TICKS, _MOST_NAMES = 200, 12, 6


def deliveries_and_effects(run: Run, ax=None):
    """Draws one bar pair a key, in the order published; where there are too many, a pair stands for several keys and shows the worst."""
    keys = list(run.statuses)
    each = -(-len(keys) // _MOST_BARS) or 1
    bars = [max(keys[at:at + each], key=lambda key: _strangeness(run, key)) for at in range(0, len(keys), each)]
    odd = [(at, key) for at, key in enumerate(bars) if run.statuses[key] != "once"]
    effects = run.facts.effects or {}
    with styled():
        title = head(plain(run.why, 300), 8.2)
        drawn = ax if ax is not None else Figure(figsize=(9, 3.4 + 0.2 * len(title)), layout="constrained").add_subplot()
        drawn.bar(range(len(bars)), [run.deliveries[key] for key in bars], 0.8, color=DELIVERIES, gid="deliveries")
        drawn.bar(range(len(bars)), [-effects.get(key, 0) for key in bars], 0.8, color=[LOOKS[run.statuses[key]].colour for key in bars], gid="effects")
        drawn.axhline(0, color=INK, lw=0.8)
        for one in (1, -1):
            drawn.axhline(one, color=LINE, lw=0.8, zorder=0)
        low, high = -max([effects.get(key, 0) for key in bars], default=1), max([run.deliveries[key] for key in bars], default=1)
        room = 0.22 * (max(high, 1) - min(low, -1))
        drawn.set(xlim=(-0.8, max(len(bars), 1) - 0.2), ylim=(min(low, -1) - room, max(high, 1) + room * 0.4))
        _name(drawn, run, odd, effects, room)
        drawn.set_title("\n".join(title), loc="left", size=10.5, weight="bold", gid="title")
        drawn.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        drawn.yaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")
        drawn.set_ylabel("effects   ←   → deliveries")
        if len(keys) <= _MOST_TICKS:
            drawn.set_xticks(range(len(bars)), [plain(key, 22) for key in bars], rotation=20 if len(keys) > 5 else 0, ha="right" if len(keys) > 5 else "center")
        else:
            drawn.set_xticks([])
        drawn.set_xlabel(f"{count(len(keys), 'key')}, in the order published" + (f"; each pair of bars is the oddest of {each} keys" if each > 1 else ""))
    said = ", ".join(f"{run.counts[status]:,} {status}" for status in LOOKS if run.counts[status])
    return finish(drawn, ax, f"Deliveries against effects: {totals(run)}; of {count(len(keys), 'key')}: {said or 'none'}. "
                             f"The verdict is {run.verdict}: {plain(run.why, 300)}.")


def _name(ax, run: Run, odd: list[tuple[int, str]], effects: dict[str, int], room: float) -> None:
    """Names the first keys that are not once, below their bars; the rest gets its mark only."""
    for at, key in odd:
        look = LOOKS[run.statuses[key]]
        y = -max(effects.get(key, 0), 0) - room * 0.14
        ax.text(at, y, look.symbol, ha="center", va="top", color=look.colour, size=8, gid=f"mark {run.statuses[key]}")


def _strangeness(run: Run, key: str) -> tuple:
    return run.statuses[key] != "once", run.deliveries[key]
