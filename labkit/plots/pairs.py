"""Picture 4, deliveries against effects: for each key a bar of deliveries upward and a bar of effects downward; of producers, orders and events."""

from matplotlib.ticker import MaxNLocator

from labkit.palette import LOOKS, WORST_FIRST
from labkit.plots.marks import draw_marks
from labkit.plots.picture import DELIVERIES, INK, LINE, MUTED, chart, finish, head, styled
from labkit.result import Run
from labkit.table import count, plain

_MOST_BARS, _MOST_TICKS, _MOST_NAMES, _MOST_MARKS = 200, 12, 4, 40
_WIDTH = 9                                            # inches


def deliveries_and_effects(run: Run, ax=None):
    """Draws one bar pair a key, in the order published; where there are too many, a pair stands for several keys and shows the oddest."""
    keys = list(run.statuses)
    each = max(1, -(-len(keys) // _MOST_BARS))
    bars = [max(keys[at:at + each], key=lambda key: _oddness(run, key)) for at in range(0, len(keys), each)]
    title, below = head(plain(run.why, 300), 8), _names(run, keys)
    with styled():
        drawn = chart(_WIDTH, 3.2 + 0.2 * len(title + below)) if ax is None else ax
        _draw_bars(drawn, run, bars, grouped=each > 1)
        drawn.set_title("\n".join(title), loc="left", size=10.5, weight="bold", pad=10 + 13 * len(below), gid="title")
        drawn.annotate("\n".join(below), (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", va="bottom", color=MUTED,
                       linespacing=1.3, gid="names")
        if len(keys) <= _MOST_TICKS:
            drawn.set_xticks(range(len(bars)), [plain(key, 22) for key in bars], rotation=20 if len(keys) > 5 else 0, ha="right" if len(keys) > 5 else "center")
        else:
            drawn.set_xticks([])
        drawn.set_xlabel(f"{count(len(keys), 'key')}, in the order {run.ORDER}" + (f"; each pair of bars is the oddest of {each} keys" if each > 1 else ""))
    return finish(drawn, ax, f"{run.SWEPT[0].capitalize()} against {run.SWEPT[1]}: {run.total}. {'; '.join(below) or 'no keys'}. Verdict: {run.verdict}; {plain(run.why, 300)}.")


def _draw_bars(ax, run: Run, bars: list[str], grouped: bool) -> None:
    delivered, effects = zip(*[run.pair(key) for key in bars]) if bars else ((), ())
    width = 0.4 if len(bars) <= _MOST_TICKS else 0.7 if len(bars) <= 60 else 1
    colours = [LOOKS[run.statuses[key]].colour for key in bars]
    if len(bars) > _MOST_TICKS:                       # what is as it should be steps back
        colours = [colour + "90" if colour == LOOKS["once"].colour else colour for colour in colours]
    if grouped:                                       # the others of a group are around its oddest, which is drawn narrow
        for one, colour in ((1, DELIVERIES), (-1, LOOKS["once"].colour)):
            ax.fill_between((-0.5, len(bars) - 0.5), 0, one, color=colour + "60", lw=0)
        width = 0.3
    ax.bar(range(len(bars)), delivered, width, color=DELIVERIES, gid="deliveries")
    ax.bar(range(len(bars)), [-number for number in effects], width, color=colours, gid="effects")
    ax.axhline(0, color=INK, lw=0.8)
    for one in (1, -1):
        ax.axhline(one, color=LINE, lw=0.8, zorder=0)
    high, low = max([1, *delivered]), max([1, *effects])
    room = 0.09 * (high + low)
    for status in [status for status in WORST_FIRST if status != "once"]:
        places = [(at, -number - room * 0.8) for at, (key, number) in enumerate(zip(bars, effects)) if run.statuses[key] == status]
        if status == "repeated":                      # a run of its two parts would read as another mark
            places = _spaced(places, 0.021 * len(bars))
        if len(places) <= _MOST_MARKS:
            draw_marks(ax, status, places, size=6, apart=0.0045 * max(len(bars), 2))
    ax.set(xlim=(-0.8, max(len(bars), 1) - 0.2), ylim=(-low - room * 1.8, high + room))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    ax.yaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")
    for middle, words in ((high / 2, run.SWEPT[0]), (-low / 2, run.SWEPT[1])):
        ax.annotate(words, (0, middle), (-30, 0), xycoords=ax.get_yaxis_transform(), textcoords="offset points", rotation=90, ha="right", va="center",
                    color=MUTED, gid="side")


def _names(run: Run, keys: list[str]) -> list[str]:
    """Returns a line a status: how many keys have it, and which, where they are few; of those that are once only the number."""
    lines = []
    for status in WORST_FIRST:
        having = [key for key in keys if run.statuses[key] == status]
        if having:
            named = [plain(key, 24) for key in having[:_MOST_NAMES]] + [f"{len(having) - _MOST_NAMES:,} more"] * (len(having) > _MOST_NAMES)
            lines.append(f"{len(having):,} {status}" + (f": {', '.join(named)}" if status != "once" else ""))
    return lines


def _spaced(places: list[tuple[float, float]], apart: float) -> list[tuple[float, float]]:
    """Returns the places, less those that are nearer than `apart` to the one before."""
    kept: list[tuple[float, float]] = []
    for place in places:
        if not kept or place[0] - kept[-1][0] >= apart:
            kept.append(place)
    return kept


def _oddness(run: Run, key: str) -> tuple:
    return -WORST_FIRST.index(run.statuses[key]), run.pair(key)
