"""Picture 3, queue growth: what waits and what is in a handler over time, the rates, and the age of the oldest."""

import heapq

import numpy
from matplotlib.ticker import MaxNLocator

from labkit import steps
from labkit.account import Account
from labkit.palette import LOOKS
from labkit.plots.picture import DELIVERIES, INK, LINE, MUTED, chart, finish, head, styled

from labkit.result import Run
from labkit.table import count, plain

_SAMPLES, _BINS = 600, 40
_SHORT_MS, _FEW = 2000, 20
_FAULTS = ("killed", "exited", "stopped", "ack.dropped")
_MOVES = (*_FAULTS, "published", "dead-lettered", "channel.closed", "cancelled", "connection.lost", steps.RECEIVE, steps.ACK, steps.NACK, steps.REJECT)
_READY, _IN_FLIGHT = DELIVERIES, LOOKS["terminal"].colour


def queue_growth(run: Run, ax=None):
    """Draws ready and in flight over time, with the faults marked; on a figure of its own also the rates and the age of the oldest."""
    growth = _Growth(run)
    with styled():
        if ax is None:
            title = head(plain(run.why, 300), 8.2)
            main, rates, age = chart(9, 5.4 + 0.2 * len(title), 3, sharex=True, height_ratios=(3, 1.4, 1.2))
            main.set_title("\n".join(title), loc="left", size=10.5, weight="bold", pad=12, gid="title")
            growth.draw_rates(rates)
            growth.draw_age(age)
            bottom = age
        else:
            main = bottom = ax
        growth.draw_queue(main)
        bottom.set_xlabel(f"{growth.unit} since the first message was confirmed")
    return finish(main, ax, f"Queue growth: {run.total}; {count(len(growth.faults), 'fault')} on the axis of time. "
                            f"Verdict: {run.verdict}; {plain(run.why, 300)}.")


class _Growth:
    """The curves over `at`, in units of `unit`: messages `ready`, `in_flight`, and the `age` of the oldest one; and when the rest happened."""

    def __init__(self, run: Run):
        settings = run.facts.settings
        automatic = settings.get("acknowledge") == "auto"
        self._ready_words = "ready" if settings.get("prefetch", 1) == 1 else "ready, or prefetched and not begun"
        account, published, waiting = Account(automatic, settings.get("dead_letter", True)), {}, []
        start = next((event.at_ms for event in run.events if event.name == "published"), 0.0)
        self.unit, scale = ("milliseconds", 1) if not run.events or run.events[-1].at_ms - start < _SHORT_MS else ("seconds", 1000)
        points, self.arrivals, self.services, self.faults = [], [], [], []
        before = 0
        for event in run.events:
            if event.name not in _MOVES:
                continue
            now = (event.at_ms - start) / scale
            account.take(event)
            if event.name == "published":
                published[event.position] = now
                heapq.heappush(waiting, event.position)
                self.arrivals.append(now)
                before += 1
            elif event.name in _FAULTS:
                self.faults.append((now, event.name))
            outstanding = len(account.outstanding)
            self.services += [now] * (before - outstanding)
            before = outstanding
            while waiting and waiting[0] not in account.outstanding:
                heapq.heappop(waiting)
            in_flight = 0 if automatic else min(outstanding, sum(len(tags) for tags in account.held.values()))
            points.append((now, outstanding - in_flight, in_flight, now - published[waiting[0]] if waiting else 0.0))
        self.at, self.ready, self.in_flight, self.age = numpy.array(points or [(0.0, 0, 0, 0.0)]).T
        self.most_ready = int(self.ready.max())

    def draw_queue(self, ax) -> None:
        at, ready, in_flight = self._sampled(self.ready, self.in_flight)
        ax.fill_between(at, ready, step="post", color=_READY, alpha=0.3, lw=0, gid="ready")
        ax.step(at, ready, where="post", color=_READY, lw=1.4, gid="ready at the moment")
        ax.step(at, in_flight, where="post", color=_IN_FLIGHT, lw=1.4, gid="in flight")
        self._label(ax, at, ready, self._ready_words, MUTED)
        most = max(1, self.most_ready, self.in_flight.max())
        self._label(ax, at, in_flight, "in flight", _IN_FLIGHT, below=in_flight.max() > 0.4 * most or most == 1)
        for line, name in enumerate(dict.fromkeys(name for _, name in self.faults)):
            times = [now for now, other in self.faults if other == name]
            few = len(times) <= _FEW
            ax.plot(times, [0] * len(times), "X" if few else "|", ms=9, color=INK, mec=ax.get_facecolor() if few else INK, ls="", clip_on=False,
                    zorder=5, gid=name)
            if few:
                ax.vlines(times, 0, 1, transform=ax.get_xaxis_transform(), color=LINE, lw=0.8, zorder=0)
            ax.annotate(name + (f", {len(times):,} times" if len(times) > 1 else ""), (times[0], 1), (0, -9 - 11 * line), xycoords=ax.get_xaxis_transform(),
                        textcoords="offset points", ha="center", size=8, gid="fault")
        ax.set_ylim(0, most * 1.25)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.set_ylabel("messages")

    def draw_rates(self, ax) -> None:
        edges = numpy.linspace(self.at[0], max(self.at[-1], self.at[0] + 1e-3), _BINS + 1)
        for times, colour, word in ((self.arrivals, _READY, "confirmed"), (self.services, LOOKS["once"].colour, "settled")):
            rate = numpy.histogram(times, edges)[0] / numpy.diff(edges) * (1000 if self.unit == "milliseconds" else 1)
            ax.stairs(rate, edges, color=colour, lw=1.4, gid=word)
            end = 0 if word == "confirmed" else _BINS      # one at each end, so that they never meet
            ax.annotate(word, (edges[end], rate.max()), (0, 3), textcoords="offset points", ha="left" if end == 0 else "right", color=colour, size=8,
                        weight="bold", gid="label")
        ax.set_ylabel("a second")
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.set_ylim(0, max(1, ax.get_ylim()[1]) * 1.2)

    def draw_age(self, ax) -> None:
        at, age = self._sampled(self.age)
        ax.fill_between(at, age, color=LOOKS["pending"].colour, alpha=0.35, lw=0, gid="age")
        ax.set_ylabel(f"age of the\noldest, {'ms' if self.unit == 'milliseconds' else 's'}")
        ax.set_ylim(0)

    def _sampled(self, *curves):
        """Returns the times and the curves, thinned to what can be seen; a step is kept where it was."""
        if len(self.at) <= _SAMPLES:
            return self.at, *curves
        chosen = numpy.searchsorted(self.at, numpy.linspace(self.at[0], self.at[-1], _SAMPLES), side="right") - 1
        return self.at[chosen], *[curve[chosen] for curve in curves]

    @staticmethod
    def _label(ax, at, curve, words: str, colour: str, below: bool = False) -> None:
        peak = int(numpy.argmax(curve))
        ax.annotate(words, (at[peak], curve[peak]), (3, -4 if below else 3), textcoords="offset points", va="top" if below else "bottom", color=colour,
                    size=8, weight="bold", gid="label")
