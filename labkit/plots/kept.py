"""Picture 5, the price of remembering: how many keys a ledger keeps, against the effects that it repeats after it forgot them."""

from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator

from labkit import sql
from labkit.errors import PlanError
from labkit.palette import LOOKS
from labkit.plots.marks import draw_marks
from labkit.plots.picture import DELIVERIES, MUTED, chart, finish, head, styled
from labkit.result import Run
from labkit.table import count

_WIDTH, _MOST_WORDS = 9, 9                            # inches; bars that have room for a word
_NONE, _REPEATED = "once", "duplicated"


def retention(runs: Sequence[Run], ax=None):
    """Draws one bar a run, in the order of `forget_after`: effects repeated upward; on a figure of its own also the keys kept, below."""
    if not (runs := sorted(runs, key=_limit)):
        raise PlanError("There is no run to draw.", "the list is empty", "Give it runs of the same messages with different `forget_after`.")
    repeated, kept = [_repeated(run) for run in runs], [_kept(run) for run in runs]
    words = ["all" if _limit(run) == float("inf") else f"{_limit(run):,}" for run in runs]
    title = _title(words, repeated, kept)
    with styled():
        if ax is None:
            lines = head(title, _WIDTH - 0.8)
            above, below = chart(_WIDTH, 3.9 + 0.2 * len(lines), 2, sharex=True)
            above.set_title("\n".join(lines), loc="left", size=10.5, weight="bold", pad=12, gid="title")
            _draw_bars(below, kept, DELIVERIES, "kept", "rows of keys\nin the ledger")
        else:
            above = below = ax
        _draw_bars(above, repeated, LOOKS[_REPEATED].colour, "repeated", "effects repeated")
        high = above.get_ylim()[1]
        for status, chosen in ((_NONE, False), (_REPEATED, True)):
            draw_marks(above, status, [(at, number + high * (0.2 if number else 0.06)) for at, number in enumerate(repeated) if bool(number) == chosen],
                       size=6, apart=0.006 * max(len(runs), 2))
        below.set_xticks(range(len(runs)), words)
        below.set_xlabel("how many keys the ledger keeps, the newest ones")
    told = "; ".join(f"{word} kept – {count(number, 'effect')} repeated, {count(rows, 'row')}" for word, number, rows in zip(words, repeated, kept))
    return finish(above, ax, f"The price of remembering: {title}. {told}.")


def _draw_bars(ax, numbers: list[int], colour: str, gid: str, label: str) -> None:
    ax.bar(range(len(numbers)), numbers, 0.55, color=colour, gid=gid)
    for at, number in enumerate(numbers):
        word, above_its_mark = f"{number:,}", gid == "repeated" and not number
        if gid == "repeated" and len(numbers) <= _MOST_WORDS:
            word = f"{word if number else 'none'} repeated"
        ax.annotate(word, (at, number), (0, 11 if above_its_mark else 3), textcoords="offset points", ha="center", va="bottom", size=8, color=MUTED, gid="number")
    ax.set(xlim=(-0.7, len(numbers) - 0.3), ylim=(0, max([1, *numbers]) * 1.4))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_ylabel(label)


def _title(words: list[str], repeated: list[int], kept: list[int]) -> str:
    enough = next((at for at in range(len(words)) if not any(repeated[at:])), None)
    if enough is None:
        return f"with {_keys(words[-1])} kept, {count(repeated[-1], 'effect')} still happened again"
    if not enough:
        return "no effect was repeated, however many keys were kept"
    return f"with {_keys(words[enough - 1])} kept, {count(repeated[enough - 1], 'effect')} happened again; with {_keys(words[enough])}, none"


def _keys(word: str) -> str:
    return f"{word} key" + "s" * (word != "1")


def _limit(run: Run) -> float:
    return run.facts.settings.get("forget_after") or float("inf")


def _repeated(run: Run) -> int:
    return sum(number - 1 for number in (run.facts.effects or {}).values())


def _kept(run: Run) -> int:
    return run.query(sql.COUNT_KEYS)[0][0]
