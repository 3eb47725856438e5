"""The mark of each status, as it is drawn in every picture."""

from collections.abc import Iterable

from labkit.palette import LOOKS

_MARKERS = {"terminal": "s", "pending": ">", "stray": "D", "nothing": "_"}
_HOLLOW, _THIN = ("lost", "stray"), 1.8


def draw_marks(ax, status: str, places: Iterable[tuple[float, float]], size: float = 9, apart: float = 0.07) -> None:
    """Draws the mark of a status at each (x, y), as its symbol in the palette; what is beside another is 2 × `apart` from it."""
    colour = LOOKS[status].colour
    shifts = (-apart, apart) if status == "duplicated" else (-apart,) if status == "repeated" else (0,)
    if status == "unknown":
        for x, y in places:
            ax.text(x, y, "?", ha="center", va="center", size=size + 3, weight="bold", color=colour, gid="mark unknown")
        return
    spots = [(x + shift, y) for x, y in places for shift in shifts]
    ax.plot([x for x, _ in spots], [y for _, y in spots], marker=_MARKERS.get(status, "o"), ms=size, mew=_THIN if status in (*_HOLLOW, "nothing") else 0.4,
            color=colour, mfc="none" if status in _HOLLOW else colour, ls="", gid=f"mark {status}")
    if status == "repeated":                          # once more, and the same
        ax.plot([x + 2 * apart for x, _ in spots], [y for _, y in spots], marker="+", ms=size * 0.8, mew=_THIN, color=colour, ls="", gid="more")
