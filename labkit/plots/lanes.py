"""Picture 1, the trail of one effect key: a lane for the broker, each worker, the ledger and a provider that was called, events from left to right."""

import itertools

from labkit import steps
from labkit.palette import LOOKS
from labkit.plots import moments
from labkit.plots.marks import draw_marks
from labkit.plots.moments import Moment
from labkit.plots.picture import BUSY, INK, LINE, MUTED, finish, head, sheet, styled
from labkit.result import Run
from labkit.table import plain

_COLUMN, _LANE, _LEFT, _RIGHT, _LINE = 0.94, 0.82, 1.05, 0.2, 0.14           # inches
_BROKER, _LEDGER, _PROVIDER = "broker", "ledger", "provider"
_WAITS = LOOKS["pending"].colour
_ABOVE = ("broker", "delivery", "answer", "publish", "confirm", "gap")            # their words stand over the broker's lane
_OF_LEDGER = ("ledger", "outbox", "terminal")         # and of these under the ledger's
_OF_PROVIDER = ("charge", "charged")


def trail(run: Run, effect_key: str, ax=None):
    """Draws the trail of one effect key under the sentence of the verdict. Raises PlanError for an unknown key."""
    found = run.trail(effect_key)
    shown = moments.of(found)
    workers = sorted({moment.lane for moment in shown} - {_BROKER, _LEDGER, _PROVIDER}, key=lambda lane: (lane.split()[0], int(lane.split()[1])))
    called = any(moment.kind in _OF_PROVIDER for moment in shown)
    lanes = [_BROKER, *workers, _LEDGER, *[_PROVIDER] * called]
    width = max(5.2, _LEFT + _COLUMN * max(len(shown), 1) + _RIGHT)
    title = head(plain(run.why, 300), width - 0.4)
    top = 0.74 + 0.2 * len(title) + _LINE * max([2, *[len(moment.words) for moment in shown if moment.kind in _ABOVE]])
    below = _LINE * (max([2, *[len(moment.words) for moment in shown if moment.kind in (_OF_PROVIDER if called else _OF_LEDGER)]]) - 2)
    height = top + _LANE * (len(lanes) - 1) + 0.6 + below
    with styled():
        drawing = _Drawing(sheet(width, height, ax), {lane: height - top - _LANE * at for at, lane in enumerate(lanes)}, width)
        drawing.ax.text(0.22, height - 0.16, "\n".join(title), weight="bold", size=10.5, va="top", linespacing=1.25, gid="title")
        status, y = run.statuses[effect_key], height - 0.3 - 0.2 * len(title)
        draw_marks(drawing.ax, status, [(0.3, y)], size=7)
        drawing.ax.text(0.48 if status in ("duplicated", "repeated") else 0.42, y, found.title, color=MUTED, va="center_baseline", gid="subtitle")
        drawing.lanes()
        drawing.busy(shown)
        drawing.transactions(shown)
        drawing.waiting(shown)
        drawing.delays(shown)
        for at, moment in enumerate(shown):
            drawing.moment(at, moment)
    said = "; ".join(moment.said for moment in shown)
    return finish(drawing.ax, ax, f"Trail of {plain(found.title, 200)}. {said}. Verdict: {run.verdict}; {plain(run.why, 300)}.")


class _Drawing:
    def __init__(self, ax, y: dict[str, float], width: float):
        self.ax, self.y, self._width = ax, y, width

    def x(self, at: float) -> float:
        return _LEFT + _COLUMN * (at + 0.5)

    def lanes(self) -> None:
        for lane, y in self.y.items():
            self.ax.text(_LEFT - 0.12, y, lane, ha="right", va="center", weight="bold", color=MUTED, gid="lane")
            self.ax.plot([_LEFT, self._width - _RIGHT], [y, y], color=LINE, lw=1, zorder=0)

    def busy(self, shown: list[Moment]) -> None:
        """Bars on the workers' lanes, from a delivery to the end of its handler, or from the begin of a producer to its end."""
        for handling in sorted({moment.handling for moment in shown} - {0}):
            places = [at for at, moment in enumerate(shown) if moment.handling == handling]
            end = self.x(places[-1]) + (0 if shown[places[-1]].kind in ("killed", "exited") else 0.14)
            self.ax.plot([self.x(places[0]), end], [self.y[shown[places[0]].lane]] * 2, color=BUSY, lw=7, zorder=1, gid="busy")

    def transactions(self, shown: list[Moment]) -> None:
        """A bracket on the ledger's lane for each transaction: closed when it was committed, open when it was undone."""
        begun: dict[str, int] = {}
        for at, moment in enumerate(shown):
            if moment.kind == "ledger" and moment.step == steps.LEDGER_BEGIN and moment.done:
                begun[moment.lane] = at
            elif moment.lane in begun and (moment.step in (steps.LEDGER_COMMIT, steps.LEDGER_ROLLBACK) and moment.done
                                           or moment.kind in ("killed", "exited")):
                start, committed = begun.pop(moment.lane), moment.step == steps.LEDGER_COMMIT and moment.done
                self.ax.plot([self.x(start), self.x(at)], [self.y[_LEDGER]] * 2, color=LOOKS["once"].colour if committed else LOOKS["unknown"].colour,
                             lw=9, alpha=0.25, solid_capstyle="butt", zorder=1, gid="committed" if committed else "undone")
                if not committed and moment.kind != "ledger":                 # a rollback says so itself
                    self.words(at, _LEDGER, ["transaction", "undone"], above=False)

    def waiting(self, shown: list[Moment]) -> None:
        """A line on the ledger's lane, while an event of the key is in the outbox, for a relay to find."""
        changes = [moment.waiting for moment in shown]
        waits = max(0, -min(itertools.accumulate(changes), default=0))        # those that an earlier run has left
        edges = [_LEFT] if waits else []
        for at, change in enumerate(changes):
            before, waits = waits, waits + change
            if bool(before) != bool(waits):
                edges.append(self.x(at))
        for start, end in zip(edges[::2], [*edges[1::2], self._width - _RIGHT]):
            self.ax.plot([start, end], [self.y[_LEDGER]] * 2, color=_WAITS, lw=2.4, solid_capstyle="butt", zorder=2, gid="waiting")

    def delays(self, shown: list[Moment]) -> None:
        """A line on the broker's lane for each copy that waits in a delay queue: to its delivery, or to the end."""
        for at, moment in enumerate(shown):
            if moment.step == steps.RETRY_PUBLISH and moment.copy:
                back = next((self.x(later) for later in range(at + 1, len(shown)) if shown[later].copy == moment.copy), self._width - _RIGHT)
                self.ax.plot([self.x(at), back], [self.y[_BROKER]] * 2, color=_WAITS, lw=2.4, solid_capstyle="butt", zorder=2, gid="delay")

    def moment(self, at: int, moment: Moment) -> None:
        getattr(self, f"_{moment.kind}")(self.x(at), moment)
        above = moment.kind in _ABOVE or moment.lane == _BROKER
        lane = _BROKER if above else _LEDGER if moment.kind in _OF_LEDGER else _PROVIDER if moment.kind in _OF_PROVIDER else moment.lane
        self.words(at, lane, moment.words, above)

    def words(self, at: int, lane: str, words: list[str], above: bool) -> None:
        y = self.y[lane] + (0.17 + _LINE * (len(words) - 1) if above else -0.25)
        for line, word in enumerate(words):           # each by itself, so that the lines of neighbours stand level
            self.ax.text(self.x(at), y - _LINE * line, word, ha="center", size=8, gid="words")

    def _broker(self, x: float, moment: Moment) -> None:
        dead = moment.step == "dead-lettered"
        self.ax.plot(x, self.y[_BROKER], "s" if dead else "o", ms=8, color=LOOKS["terminal"].colour if dead else INK, zorder=4, gid=moment.step)

    def _delivery(self, x: float, moment: Moment) -> None:
        self._arrow(x, self.y[_BROKER], self.y[moment.lane], gid="redelivery" if moment.again else "delivery")

    def _answer(self, x: float, moment: Moment) -> None:
        start, end = self.y[moment.lane], self.y[_BROKER]
        if moment.arrived:
            self._arrow(x, start, end, gid=moment.step)
        else:
            self._break(x, start, self._near_broker(moment), moment.dropped)

    _publish = _answer

    def _confirm(self, x: float, moment: Moment) -> None:
        if moment.arrived:
            self._arrow(x, self.y[_BROKER], self.y[moment.lane], gid=moment.step, width=0.8)
        else:
            self._break(x, self.y[_BROKER], self._near_broker(moment), moment.dropped)

    def _near_broker(self, moment: Moment) -> float:
        return self._near(self.y[moment.lane], self.y[_BROKER])

    def _near(self, start: float, end: float) -> float:
        """A place on the way to `end`, short of it, and on no other lane."""
        return start + (end - start) * (1 - 0.4 / (1 + round((abs(end - start) - _LANE) / _LANE)))

    def _break(self, x: float, start: float, stop: float, dropped: bool) -> None:
        """A broken arrow from `start`, that ends on the way."""
        colour = LOOKS["unknown"].colour
        self.ax.plot([x, x], [start, stop - (0.08 if stop > start else -0.08)], color=colour, lw=1.6, ls=(0, (3, 2)), zorder=3, gid="broken arrow")
        if dropped:
            self.ax.plot(x, stop, "x", ms=8, mew=2, color=colour, zorder=4, gid="dropped")
        else:
            draw_marks(self.ax, "unknown", [(x, stop)])

    def _outbox(self, x: float, moment: Moment) -> None:
        self.ax.plot([x, x], [self.y[moment.lane], self.y[_LEDGER]], color=MUTED, lw=0.9, ls=(0, (1, 2)), zorder=2)
        if moment.step == steps.OUTBOX_ADD and moment.done:
            self._event(x, moment.waiting > 0)
        else:
            self.ax.plot(x, self.y[_LEDGER], "D", ms=5, mew=1.6, color=MUTED, mfc=self.ax.get_facecolor(), zorder=4, gid=moment.step)

    def _event(self, x: float, durable: bool) -> None:
        """The event that waits in the outbox, filled once it is there for good."""
        self.ax.plot(x, self.y[_LEDGER], ">", ms=8, mew=1.6, color=_WAITS, mfc=_WAITS if durable else self.ax.get_facecolor(), zorder=4,
                     gid="event" if durable else steps.OUTBOX_ADD)

    def _charge(self, x: float, moment: Moment) -> None:
        start, end = self.y[moment.lane], self.y[_PROVIDER]
        if moment.arrived:
            self._arrow(x, start, end, gid="call")
            if not moment.effects:                    # turned away, or charged for another key
                self.ax.plot(x, end, "o" if moment.done else "D", ms=9 if moment.done else 5, mew=1.6, color=MUTED, mfc=self.ax.get_facecolor(), zorder=4, gid=moment.step)
        else:
            self._break(x, start, self._near(start, end), moment.dropped)
        if moment.effects:
            self._charged(x, moment)

    def _charged(self, x: float, moment: Moment) -> None:
        self.ax.plot(x, self.y[_PROVIDER], "o", ms=11, mew=1.6, color=LOOKS["duplicated" if moment.again else "once"].colour, zorder=4, gid="charge")

    def _ledger(self, x: float, moment: Moment) -> None:
        self.ax.plot([x, x], [self.y[moment.lane], self.y[_LEDGER]], color=MUTED, lw=0.9, ls=(0, (1, 2)), zorder=2)
        if moment.step == steps.LEDGER_BEGIN or moment.step == steps.LEDGER_COMMIT and not moment.effects:
            marker, colour, filled, size = "|", MUTED, True, 12
        elif moment.effects:                          # they are there now, for good
            marker, colour, filled, size = "o", LOOKS["duplicated" if moment.again else "once"].colour, True, 11
        elif moment.step in (steps.LEDGER_RECORD, steps.LEDGER_RECORD_ONCE):
            marker, colour, filled, size = "o", MUTED, False, 9
        else:
            marker, colour, filled, size = "D", MUTED, False, 5
        self.ax.plot(x, self.y[_LEDGER], marker, ms=size, mew=1.6, color=colour, mfc=colour if filled else self.ax.get_facecolor(), zorder=4,
                     gid="effect" if moment.effects else moment.step)
        if moment.waiting > 0:
            self._event(x + 0.2, durable=True)

    def _terminal(self, x: float, moment: Moment) -> None:
        self.ax.plot([x, x], [self.y[moment.lane], self.y[_LEDGER]], color=MUTED, lw=0.9, ls=(0, (1, 2)), zorder=2)
        colour = LOOKS["terminal"].colour
        self.ax.plot(x, self.y[_LEDGER], "s", ms=9, mew=1.6, color=colour, mfc=colour if moment.done else self.ax.get_facecolor(), zorder=4, gid=moment.step)

    def _killed(self, x: float, moment: Moment) -> None:
        self.ax.plot(x, self.y[moment.lane], "X", ms=13, color=INK, mec=self.ax.get_facecolor(), mew=1.2, zorder=5, gid="killed")

    _exited = _killed

    def _note(self, x: float, moment: Moment) -> None:
        self.ax.plot(x, self.y[moment.lane], "o", ms=7, color=INK, mfc=self.ax.get_facecolor(), mew=1.5, zorder=4, gid=moment.step)

    def _missing(self, x: float, moment: Moment) -> None:
        draw_marks(self.ax, moment.step, [(x, self.y[moment.lane])], size=11)

    def _gap(self, x: float, moment: Moment) -> None:
        for y in self.y.values():
            self.ax.text(x, y, "· · ·", ha="center", va="center", weight="bold", color=MUTED, backgroundcolor=self.ax.get_facecolor(), gid="gap")

    def _arrow(self, x: float, start: float, end: float, gid: str, width: float = 1.4) -> None:
        self.ax.annotate("", (x, end), (x, start), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": width, "shrinkA": 3, "shrinkB": 5,
                                                               "mutation_scale": 12}, zorder=3, gid=gid)
