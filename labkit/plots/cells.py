"""Picture 2, the sweep map: a row a handler or a producer, a cell a crash point, and in each what the key ended as."""

import itertools
import textwrap
from collections.abc import Sequence

from matplotlib.patches import FancyBboxPatch

from labkit.errors import PlanError
from labkit.faults import RELAY, ROLES, WORKER
from labkit.palette import LOOKS
from labkit.plots.marks import draw_marks
from labkit.plots.picture import INK, MUTED, finish, head, sheet, styled
from labkit.sweep import Sweep, SweepRow
from labkit.table import plain

_CELL, _HEIGHT, _LEFT, _GAP, _LINE = 0.86, 0.62, 1.45, 0.06, 0.13              # inches
_A_LINE = 13                                          # cells; a longer sweep goes on below
_TITLE = "Each cell is one run, with the {} killed at that point"


def sweep_map(sweeps: Sequence[Sweep], ax=None):
    """Draws sweeps below each other, each cell with its status as colour, mark and word. Raises PlanError when there are none."""
    if not sweeps:
        raise PlanError("There is no sweep to draw.", "the list is empty", "Write plots.sweep_map([lab.sweep(handler, lab.reminders(1))]).")
    roles = {RELAY if fault.worker == RELAY else sweep.rows[0].run.role for sweep in sweeps for row in sweep.rows for fault in row.faults}
    *others, last = sorted(roles or {WORKER}, key=ROLES.index)
    killed = _TITLE.format(f"{', '.join(others)} or {last}" if others else last)
    shared = len(sweeps) > 1 and len({tuple(row.point for row in sweep.rows) for sweep in sweeps}) == 1 and len(sweeps[0].rows) <= _A_LINE
    lines = [(None if at else sweep, rows) for sweep in sweeps for at, rows in enumerate(_lines(sweep.rows))]
    names = [max(len(_words(row.point)) for row in rows) * _LINE + 0.06 for _, rows in lines]
    if shared:
        names = [names[0], *[0.0] * (len(lines) - 1)]
    width = max(5.2, _LEFT + _CELL * max(len(rows) for _, rows in lines) + 0.25)
    title = head(plain(sweeps[0].why, 300), width - 0.4) if len(sweeps) == 1 else [killed]
    top = 0.3 + 0.2 * len(title) + 0.22 * (len(sweeps) == 1)
    height = top + 0.1 + sum(names) + (_HEIGHT + 0.2) * len(lines)
    with styled():
        sheet_ax = sheet(width, height, ax)
        sheet_ax.text(0.22, height - 0.16, "\n".join(title), weight="bold", size=10.5, va="top", linespacing=1.25, gid="title")
        if len(sweeps) == 1:
            sheet_ax.text(0.22, height - 0.22 - 0.2 * len(title), killed, color=MUTED, va="top", gid="subtitle")
        y = height - top
        for (first, rows), room in zip(lines, names):
            y -= room + _HEIGHT
            if first:
                _draw_name(sheet_ax, first, y + _HEIGHT / 2)
            for at, row in enumerate(rows):
                _draw_cell(sheet_ax, row, _LEFT + _CELL * at, y)
                if room:
                    sheet_ax.text(_LEFT + _CELL * (at + 0.5), y + _HEIGHT + 0.05, "\n".join(_words(row.point)), ha="center", va="bottom",
                                  size=7.5, color=MUTED, linespacing=1.15, gid="point")
            y -= 0.2
    return finish(sheet_ax, ax, f"{killed}. " + " ".join(map(_said, sweeps)))


def _draw_name(ax, sweep: Sweep, y: float) -> None:
    bad = sum(row.verdict == sweep.verdict for row in sweep.rows[1:])
    said = sweep.verdict
    if said != "holds":
        said += f" at {bad} of {len(sweep.rows) - 1}" if bad else " without a crash"
    ax.text(0.22, y + 0.02, plain(sweep.name, 17), weight="bold", va="bottom", gid="name")
    ax.text(0.22, y - 0.02, said, color=MUTED, va="top", size=8, gid="verdict")


def _draw_cell(ax, row: SweepRow, x: float, y: float) -> None:
    colour, quiet = LOOKS[row.status].colour, row.status == "nothing"
    ax.add_patch(FancyBboxPatch((x + _GAP / 2, y), _CELL - _GAP, _HEIGHT, boxstyle="round,pad=0,rounding_size=0.07", gid=f"cell {row.status}",
                                facecolor=colour + ("10" if quiet else "30"), edgecolor=colour + ("70" if quiet else ""), linewidth=1.1))
    draw_marks(ax, row.status, [(x + _CELL / 2, y + _HEIGHT * 0.66)])
    ax.text(x + _CELL / 2, y + _HEIGHT * 0.24, row.status, ha="center", va="center", size=8, color=MUTED if quiet else INK, gid="status")


def _lines(rows: list[SweepRow]) -> list[list[SweepRow]]:
    """Returns the rows in lines that fit; where one is not enough, the relay's crash points begin a line of their own."""
    parts = [list(part) for _, part in itertools.groupby(rows, lambda row: bool(row.faults) and row.faults[0].worker == RELAY)]
    return [rows] if len(rows) <= _A_LINE else [part[at:at + _A_LINE] for part in parts for at in range(0, len(part), _A_LINE)]


def _words(point: str) -> list[str]:
    """Returns a crash point in lines that fit over its cell."""
    lines = []
    for part in point.replace(".", ". ").split(", "):
        lines += textwrap.wrap(part, 12, break_long_words=False)
    return [line.replace(". ", ".") for line in lines]


def _said(sweep: Sweep) -> str:
    return f"{sweep.name}: " + ", ".join(f"{row.point} – {row.status}" for row in sweep.rows) + f". Verdict: {sweep.verdict}; {sweep.why}."
