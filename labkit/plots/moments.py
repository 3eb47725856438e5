"""What a trail's picture shows: its entries, put together so that each moment is one column."""

from dataclasses import dataclass, field

from labkit import steps
from labkit.faults import PRODUCER, RELAY
from labkit.table import plain
from labkit.trail import Entry, Trail

_SHOWN_FIRST, _SHOWN_LAST = 10, 4
_WRITES = (steps.LEDGER_RECORD, steps.LEDGER_RECORD_ONCE)


@dataclass
class Moment:
    """One column of the picture.

    kind:     "broker", "delivery", "ledger", "outbox", "answer" (which a publish is drawn like), "confirm", "killed", "exited", "note", "missing" or "gap"
    words:    the lines beside its mark; said: the same in a sentence
    handling: which of the trail's deliveries it belongs to, 1 and up, 0 for none
    again:    a redelivery, or an effect that was there already
    effects:  how many effects of the key became durable here
    """

    kind: str
    lane: str
    step: str
    words: list[str] = field(default_factory=list)
    said: str = ""
    handling: int = 0
    done: bool = True
    again: bool = False
    effects: int = 0
    arrived: bool = True
    dropped: bool = False


def of(trail: Trail) -> list[Moment]:
    """Returns the moments of a trail, the middle ones left out where there are too many to draw."""
    moments = _Reading(trail).moments
    left_out = len(moments) - _SHOWN_FIRST - _SHOWN_LAST
    if left_out > 1:
        moments[_SHOWN_FIRST:-_SHOWN_LAST] = [Moment("gap", "broker", "", [f"{left_out} events", "left out"], f"{left_out} events left out")]
    return moments


class _Reading:
    def __init__(self, trail: Trail):
        self._key, self._copies = trail.effect_key, trail.copies
        self.moments: list[Moment] = []
        self._handling: dict[str, int] = {}           # lane -> the delivery under way
        self._tentative: dict[str, int] = {}          # lane -> effects written in its open transaction
        self._handlings = self._effects = 0
        self._reached: dict[str, str] = {}            # lane -> a step that was reached and not done
        self._last: dict[str, str] = {}               # lane -> the step done last
        self._dropped = False
        for at, entry in enumerate(trail.entries):
            self._take(entry, trail.entries[at + 1:])
        if missing := trail.run.missing(trail.effect_key):
            self.moments.append(Moment("missing", *missing))

    def _take(self, entry: Entry, rest: list[Entry]) -> None:
        event = entry.event
        name, lane = event.name, event.lane
        if event.phase == steps.BEFORE:
            later = [other.event for other in rest if other.event.lane == lane and other.event.name not in ("channel.closed", "connection.lost")]
            if later and later[0].name == name and later[0].phase != steps.BEFORE:
                return                                # it is drawn when it is done
            self._reached[lane] = name
            if name != steps.RECEIVE:
                if not later or later[0].name not in ("killed", "exited", "raised", "stopped"):
                    self._add("note", entry, [_short(name), "not finished"], f"{name} not finished", done=False)
                return
        if lane.split()[0] in (PRODUCER, RELAY) and lane not in self._handling:
            self._handlings += 1
            self._handling[lane] = self._handlings
        if name in ("ack.dropped", "confirm.dropped"):
            self._dropped = True
        elif name == "returned":
            self._handling.pop(lane, None)
            self._tentative.pop(lane, None)           # what the handler left open is undone
        elif lane == "broker":
            self._add("broker", entry, [name], name)
        elif name == steps.RECEIVE:
            self._deliver(entry)
        elif name in (*steps.ANSWERS, steps.PUBLISH):
            self._answer(entry)
        elif name == steps.CONFIRM:
            self._confirm(entry)
        elif name.startswith("outbox."):
            self._add("outbox", entry, [*name.split("."), *[entry.outcome] * (name == steps.OUTBOX_READ)], f"{name}: {entry.outcome}")
        elif name.startswith("ledger."):
            self._ledger(entry)
        else:
            self._note(entry)
        if name in steps.STEPS:
            self._last[lane] = name

    def _deliver(self, entry: Entry) -> None:
        lane, again = entry.event.lane, bool(entry.event.detail.get("redelivered"))
        self._handlings += 1
        self._handling[lane] = self._handlings
        number = f" {entry.attempt}" if entry.attempt else ""
        words = [f"message {entry.event.position}"] * (self._copies > 1) + [f"delivery{number}"] + ["redelivered"] * again
        self._add("delivery", entry, words, f"delivery{number} to {lane}" + ", redelivered" * again, again=again)

    def _answer(self, entry: Entry) -> None:
        name, outcome, detail = entry.event.name, entry.event.detail.get("outcome"), entry.event.detail
        said = {"unknown": "dropped" if self._dropped else "unknown", "refused": "refused", "not sent": "not sent"}.get(outcome, "")
        extra = said or ("requeue" if detail.get("requeue") else "multiple" if detail.get("multiple") else "")
        self._add("answer", entry, [name] + [extra] * bool(extra), name + (f", {extra}" if extra else ""),
                  arrived=outcome not in ("unknown", "not sent"), dropped=self._dropped and name in steps.ANSWERS)
        self._dropped = self._dropped and name not in steps.ANSWERS

    def _confirm(self, entry: Entry) -> None:
        outcome = str(entry.event.detail.get("outcome"))
        came = outcome in ("confirmed", "nacked", "returned") or "confirmed" in outcome
        self._add("confirm", entry, [outcome], f"confirm: {outcome}", arrived=came, dropped=self._dropped)
        self._dropped = False

    def _ledger(self, entry: Entry) -> None:
        name, lane, detail = entry.event.turn or entry.event.name, entry.event.lane, entry.event.detail
        effects, outcome = 0, "failed" if entry.event.phase == steps.FAILED else detail.get("outcome", "")
        if name in _WRITES and entry.event.phase == steps.AFTER:
            outcome = outcome or "recorded"
            if outcome == "recorded" and detail.get("effect_key", entry.event.effect_key) != self._key:
                outcome = "for another key"
            if outcome == "recorded" and entry.tentative:
                self._tentative[lane] = self._tentative.get(lane, 0) + 1
                outcome = "not yet durable"
            elif outcome == "recorded":
                effects = 1
        elif name == steps.LEDGER_COMMIT:
            effects = self._tentative.pop(lane, 0) if entry.event.turn else 0
            outcome = "recorded" if effects else outcome
        elif name == steps.LEDGER_ROLLBACK:
            self._tentative.pop(lane, None)
        again = bool(effects) and self._effects + effects > 1
        self._effects += effects
        outcome = "recorded again" if again else outcome
        words = [_short(name), outcome]
        self._add("ledger", entry, [word for word in words if word], name + (f": {outcome}" if outcome else ""),
                  step=name, done=entry.event.phase == steps.AFTER, again=again, effects=effects)

    def _note(self, entry: Entry) -> None:
        name, lane, detail = entry.event.name, entry.event.lane, entry.event.detail
        reached = self._reached.pop(lane, None)
        if name in ("killed", "exited"):
            if detail.get("by", "hand") == "hand":
                where = "by hand" if "by" in detail else "by itself"
            else:
                where = f"before {_short(reached)}" if reached else f"after {_short(self._last.get(lane, ''))}"
            self._add(name, entry, [name, where], f"{lane} {name} {where}")
            self._handling.pop(lane, None)
            self._tentative.pop(lane, None)
        elif name == "raised":
            self._tentative.pop(lane, None)
            kind = plain(detail["error"].split(":", 1)[0])
            self._add("note", entry, ["raised", kind[:16]], f"{lane} raised {kind}")
        else:
            word = "frozen" if name == "stopped" else name
            words = [*word.split("."), *([f"before {_short(reached)}"] if reached and name == "stopped" else [])]
            self._add("note", entry, words, f"{lane}: {' '.join(words)}")

    def _add(self, kind: str, entry: Entry, words: list[str], said: str, step: str = "", **more) -> None:
        self.moments.append(Moment(kind, entry.event.lane, step or entry.event.name, words, said, self._handling.get(entry.event.lane, 0), **more))


def _short(step: str) -> str:
    return step.removeprefix("ledger.")
