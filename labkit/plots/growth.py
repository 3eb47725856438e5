"""Picture 3, queue growth: what waits and what is in a handler over time, the rates, and the age of the oldest; a column for each run."""

import numpy
from matplotlib.ticker import MaxNLocator

from labkit.palette import LOOKS
from labkit.plots import curves
from labkit.plots.picture import DELIVERIES, INK, LINE, MUTED, chart, finish, head, styled
from labkit.table import plain

_SHORT_MS, _FEW = 2000, 20
_WIDTH, _COLUMN = 9, 2.9                              # inches: of the picture, and of a column where there are many
_READY, _IN_FLIGHT = DELIVERIES, LOOKS["terminal"].colour
_RATES = {"confirmed": _READY, "settled": LOOKS["once"].colour, "delivered": _IN_FLIGHT}


def queue_growth(*shown, ax=None):
    """Draws runs, or watches of runs, beside each other on one scale: ready and in flight over time with the faults marked, the rates, the age of the oldest.

    With `ax` it draws the first part there, of one run.
    """
    columns = [curves.of(one) for one in shown]
    scale, unit = (1, "milliseconds") if max(column.at[-1] for column in columns) < _SHORT_MS else (1000, "seconds")
    with styled():
        if ax is not None:
            _draw_queue(ax, columns[0], scale, 1)
            ax.set_ylim(0, columns[0].most * 1.25)
            drawn = [[ax]]
        else:
            width = max(_WIDTH, _COLUMN * len(columns))
            titles = [head(plain(column.name, 300), (width - 0.8) / len(columns)) for column in columns]
            above = 11 * any(column.note for column in columns) + 11 * (len(columns) > 1)
            drawn = chart(width, 5.4 + 0.2 * max(map(len, titles)) + above / 72, 3, len(columns), sharex=True, sharey="row", squeeze=False,
                          height_ratios=(3, 1.4, 1.2)).T
            for column, (main, rates, age), title in zip(columns, drawn, titles):
                main.set_title("\n".join(title), loc="left", size=10.5, weight="bold", pad=(6 if above else 12) + above, gid="title")
                main.annotate(column.note, (0, 1), (0, 5 + 11 * (len(columns) > 1)), xycoords="axes fraction", textcoords="offset points", color=MUTED, gid="note")
                _draw_queue(main, column, scale, len(columns))
                _draw_rates(rates, column, scale, any(other.repeats for other in columns))
                _draw_age(age, column, scale)
            _set_scales(drawn, columns, scale)
        drawn[0][-1].set_xlabel(f"{unit} since the first message was confirmed", **{"loc": "left", "in_layout": False} if len(columns) > 1 else {})
        for others in drawn[1:]:
            others[-1].set_xlabel(" ")                # room for the one that is written for all
    return finish(drawn[0][0], ax, "Queue growth: " + " ".join(column.words for column in columns))


def _draw_queue(ax, column: curves.Curves, scale: float, columns: int) -> None:
    at, ready, in_flight = column.thinned(column.ready, column.in_flight)
    at, post = at / scale, None if column.sampled else "post"
    ax.fill_between(at, ready, step=post, color=_READY, alpha=0.3, lw=0, gid="ready")
    ax.plot(at, ready, drawstyle="steps-post" if post else "default", color=_READY, lw=1.4, gid="ready at the moment")
    ax.step(at, in_flight, where="post", color=_IN_FLIGHT, lw=1.4, gid="in flight")
    if columns == 1:
        _label(ax, at, numpy.nan_to_num(ready), column.told, MUTED)
        _label(ax, at, in_flight, "in flight", _IN_FLIGHT, below=in_flight.max() > 0.4 * column.most or column.most == 1)
    for line, name in enumerate(dict.fromkeys(name for _, name in column.faults)):
        times = [now / scale for now, other in column.faults if other == name]
        few = len(times) <= _FEW
        ax.plot(times, [0] * len(times), "X" if few else "|", ms=9, color=INK, mec=ax.get_facecolor() if few else INK, ls="", clip_on=False,
                zorder=5, gid=name)
        if few:
            ax.vlines(times, 0, 1, transform=ax.get_xaxis_transform(), color=LINE, lw=0.8, zorder=0)
        ax.annotate(name + (f", {len(times):,} times" if len(times) > 1 else ""), (times[0], 1), (0, -9 - 11 * line), xycoords=ax.get_xaxis_transform(),
                    textcoords="offset points", ha="center", size=8, gid="fault")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_ylabel("messages")


def _draw_rates(ax, column: curves.Curves, scale: float, repeats: bool) -> None:
    for word in list(_RATES)[:3 if repeats else 2]:
        rate, edges = column.rates(word)
        ax.stairs(rate, edges / scale, color=_RATES[word], lw=2.6 if word == "confirmed" else 1.4, zorder=3 if word == "settled" else 2, gid=word)
    ax.set_ylabel("a second")
    ax.yaxis.set_major_formatter("{x:,.0f}")


def _draw_age(ax, column: curves.Curves, scale: float) -> None:
    at, age = column.thinned(column.age)
    ax.fill_between(at / scale, age / scale, color=LOOKS["pending"].colour, alpha=0.35, lw=0, gid="age")
    ax.set_ylabel(f"age of the\noldest, {'ms' if scale == 1 else 's'}")


def _set_scales(drawn, columns: list[curves.Curves], scale: float) -> None:
    """One scale for all columns; what is written at the left of a row is written once."""
    main, rates, age = drawn[0]
    repeats = any(column.repeats for column in columns)
    _write_above(rates, {word: colour for word, colour in _RATES.items() if word != "delivered" or repeats})
    if len(columns) > 1:
        _write_above(main, {column.told: MUTED for column in columns} | {"in flight": _IN_FLIGHT})
    main.set_ylim(0, max(column.most for column in columns) * 1.25)
    rates.set_ylim(0, max([1, *[column.rates(word)[0].max() for column in columns for word in _RATES if word != "delivered" or repeats]]) * 1.15)
    age.set_ylim(0, max([column.age.max() for column in columns] + [1e-3]) / scale * 1.05)
    for others in drawn[1:]:
        for ax in others:
            ax.set_ylabel("")


def _write_above(ax, words: dict[str, str]) -> None:
    """Writes what the curves are, each in its colour, above the axes: where several columns share them, once is enough."""
    left = 0
    for word, colour in words.items():
        ax.annotate(word, (0, 1), (left, 3), xycoords="axes fraction", textcoords="offset points", color=colour, size=8, weight="bold", gid="label")
        left += 5.3 * len(word) + 9


def _label(ax, at, curve, words: str, colour: str, below: bool = False) -> None:
    peaks = numpy.flatnonzero(curve == curve.max())
    peak = peaks[len(peaks) // 2]
    late = at[peak] - at[0] > 0.6 * (at[-1] - at[0])  # there is no room at its right
    ax.annotate(words, (at[peak], curve[peak]), (-3 if late else 3, -4 if below else 3), textcoords="offset points", va="top" if below else "bottom",
                ha="right" if late else "left", color=colour, size=8, weight="bold", gid="label")
