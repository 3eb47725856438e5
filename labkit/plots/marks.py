"""The mark of each status, as it is drawn in every picture."""

from labkit.palette import LOOKS

_MARKERS = {"lost": "o", "terminal": "s", "pending": ">", "unknown": "$?$"}


def draw_mark(ax, status: str, x: float, y: float, size: float = 9, apart: float = 0.07) -> None:
    """Draws the mark of a status: one dot, two dots 2 × `apart` from each other, a ring, a square, a triangle or a question mark."""
    colour = LOOKS[status].colour
    shifts = (-apart, apart) if status == "duplicated" else (0,)
    ax.plot([x + shift for shift in shifts], [y] * len(shifts), _MARKERS.get(status, "o"), ms=size, mew=1.8 if status == "lost" else 0.4,
            color=colour, mfc="none" if status == "lost" else colour, ls="", gid=f"mark {status}")
