"""What a trail's picture shows: its entries, put together so that each moment is one column."""

import re
from dataclasses import dataclass, field

from labkit import steps
from labkit.faults import PRODUCER, RELAY
from labkit.table import plain
from labkit.trace import Event
from labkit.trail import Entry, Trail

_SHOWN_FIRST, _SHOWN_LAST = 10, 4
_REFUSED, _UNANSWERED = "ConnectionRefusedError", ("TimeoutError", "Connection", "RemoteDisconnected", "BrokenPipeError")      # what a call of the provider raised
_WRITES = (steps.LEDGER_RECORD, steps.LEDGER_RECORD_ONCE)


@dataclass
class Moment:
    """One column of the picture.

    kind:     "broker", "delivery", "ledger", "outbox", "answer", "publish", "confirm", "terminal", "charge", "charged", "killed", "exited", "note", "missing" or "gap"
    words:    the lines beside its mark; said: the same in a sentence
    handling: which of the trail's deliveries it belongs to, 1 and up, 0 for none
    again:    a redelivery, or an effect that was there already
    effects:  how many effects of the key became durable here, or charges were made
    waiting:  how many more events of the key wait in the outbox from here on, durably
    copy:     of a retry, the copy that it makes; of a delivery, the copy that it hands over; else, and for the first one, None
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
    waiting: int = 0
    copy: tuple[int, int] | None = None
    arrived: bool = True
    dropped: bool = False


def of(trail: Trail) -> list[Moment]:
    """Returns the moments of a trail, the middle ones left out where there are too many to draw."""
    moments = _Reading(trail).moments
    left_out = len(moments) - _SHOWN_FIRST - _SHOWN_LAST
    if left_out > (1 if trail.run.messages else 2):   # an order, a relay that dies at its last step and the next one's pass are whole
        waiting = sum(moment.waiting for moment in moments[_SHOWN_FIRST:-_SHOWN_LAST])
        moments[_SHOWN_FIRST:-_SHOWN_LAST] = [Moment("gap", "broker", "", [f"{left_out} events", "left out"], f"{left_out} events left out", waiting=waiting)]
    return moments


class _Reading:
    def __init__(self, trail: Trail):
        self._key, self._copies, self._trail = trail.effect_key, trail.copies, trail
        self.moments: list[Moment] = []
        self._handling: dict[str, int] = {}           # lane -> the delivery under way
        self._tentative: dict[str, int] = {}          # lane -> effects written in its open transaction
        self._moved: dict[str, int] = {}              # lane -> events added to the outbox in it, less those marked
        self._ids: dict[str, set[str]] = {}           # key -> the ids of the events that were published for it
        self._handlings = self._effects = self._charges = 0
        self._in_vain = 0                             # charges that were made while somebody waits in vain for an answer
        self._reached: dict[str, str] = {}            # lane -> a step that was reached and not done
        self._last: dict[str, str] = {}               # lane -> the step done last
        self._dropped: set[str] = set()               # "ack", "publish" or "confirm", until who sent it or waits for it is heard of
        self._unheard: set[str] = set()               # lanes whose last publish was dropped, so that the broker has nothing to confirm
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
        if _alone(lane) and lane not in self._handling:
            self._handlings += 1
            self._handling[lane] = self._handlings
        if name in ("ack.dropped", "publish.dropped", "confirm.dropped"):
            self._dropped.add(name.split(".")[0])
        elif name == "returned":
            self._handling.pop(lane, None)
            self._undo(lane)                          # what the handler left open
        elif lane == "broker":
            self._add("broker", entry, [name], name)
        elif name == steps.RECEIVE:
            self._deliver(entry)
        elif name in steps.ANSWERS:
            self._answer(entry)
        elif name == steps.PUBLISH:
            self._publish(entry)
        elif name == steps.CONFIRM:
            self._confirm(entry)
        elif name == steps.RETRY_PUBLISH:
            self._retry(entry)
        elif name == steps.TERMINAL_RECORD:
            outcome = "failed" if event.phase == steps.FAILED else event.detail["route"]
            self._add("terminal", entry, ["terminal", "record", outcome], f"{name}: {outcome}", done=outcome != "failed")
        elif name == steps.PROVIDER_CHARGE:
            self._charge(entry)
        elif name == "charged":
            self._hear_charge(entry, [other.event for other in rest])
        elif name.startswith("outbox."):
            self._outbox(entry)
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
        self._add("delivery", entry, words, f"delivery{number} to {lane}" + ", redelivered" * again, again=again,
                  copy=(entry.event.position, entry.event.detail["copy"]) if "copy" in entry.event.detail else None)

    def _answer(self, entry: Entry) -> None:
        name, outcome, detail = entry.event.name, entry.event.detail.get("outcome"), entry.event.detail
        dropped = name in self._dropped
        said = {"unknown": "dropped" if dropped else "unknown", "refused": "refused"}.get(outcome, "")
        extra = said or ("requeue" if detail.get("requeue") else "multiple" if detail.get("multiple") else "")
        self._add("answer", entry, [name] + [extra] * bool(extra), name + (f", {extra}" if extra else ""), arrived=outcome != "unknown", dropped=dropped)
        self._dropped.discard(name)

    def _publish(self, entry: Entry) -> None:
        detail, dropped = entry.event.detail, "publish" in self._dropped
        self._dropped.discard("publish")
        (self._unheard.add if dropped else self._unheard.discard)(entry.event.lane)
        if entry.event.phase == steps.FAILED or detail.get("outcome") == "not sent" and not dropped:
            why = detail.get("outcome", "failed")
            self._add("note", entry, ["publish", why], f"publish, {why}", done=False)
            return
        ids = self._ids.setdefault(detail.get("effect_key"), set())
        extra = ["same id" if detail.get("event_id") in ids else "another id"] if ids else []
        extra += ["dropped"] * dropped
        ids.add(detail.get("event_id"))
        self._add("publish", entry, ["publish", *extra], ", ".join(["publish", *extra]), arrived=not dropped, dropped=dropped)

    def _retry(self, entry: Entry) -> None:
        outcome = "failed" if entry.event.phase == steps.FAILED else entry.event.detail["outcome"]
        words = ["retry", f"in {entry.event.detail['delay_ms']:,} ms"]
        if outcome == "confirmed":
            self._add("publish", entry, words, " ".join(words), copy=(entry.event.position, entry.event.attempt))
        else:
            self._add("note", entry, ["retry", outcome], f"retry, {outcome}", done=False)

    def _confirm(self, entry: Entry) -> None:
        outcome = "failed" if entry.event.phase == steps.FAILED else entry.event.detail.get("outcome") or "nothing sent"
        dropped, missed = "confirm" in self._dropped, "unknown" in outcome or "blocked" in outcome
        words = outcome.replace("unknown", "dropped" if dropped else "unknown").split(", ")
        if missed and entry.event.lane in self._unheard or not missed and not any(word in outcome for word in ("confirmed", "nacked", "returned")):
            self._add("note", entry, ["confirm", *words], f"confirm, {outcome}", done=False)
        elif words[0] in ("confirmed", "nacked", "returned"):
            self._add("confirm", entry, words, outcome)
        else:
            self._add("confirm", entry, ["confirm", *words], ", ".join(["confirm", *words]), arrived=not missed, dropped=dropped)
        self._dropped.discard("confirm")

    def _charge(self, entry: Entry) -> None:
        event, charges = entry.event, 0
        if event.phase == steps.AFTER:
            charges = event.detail.get("effect_key", event.effect_key) == self._key
            how, outcome = {}, ["for another key"] if not charges else []
        elif event.detail["error"].startswith(_REFUSED):
            how, outcome = {"arrived": False, "dropped": True}, ["refused"]
        elif status := re.match(r"HTTPError: HTTP Error (\d+)", event.detail["error"]):
            how, outcome = {}, [f"answer {status[1]}"]
        elif event.detail["error"].startswith(_UNANSWERED):
            charges, self._in_vain = min(self._in_vain, 1), max(self._in_vain - 1, 0)
            how, outcome = {"arrived": False}, ["no answer"]
        else:
            self._add("note", entry, ["charge", "failed"], "charge, failed", done=False)
            return
        self._mark_charge("charge", entry, ["charge"], outcome, int(charges), done=event.phase == steps.AFTER, **how)

    def _hear_charge(self, entry: Entry, rest: list[Event]) -> None:
        """Draws a charge that nobody heard of with the call that waited for its answer, or by itself when nobody waits any more."""
        begun = {other.lane for other in self._trail.run.events if other.at_ms <= entry.event.at_ms and other.name == steps.PROVIDER_CHARGE and other.phase == steps.BEFORE}
        ends = [next((other for other in rest if other.lane == lane and other.name in (steps.PROVIDER_CHARGE, "killed", "exited")), None) for lane in begun]
        waiting = sum(end is not None and end.phase == steps.FAILED and end.detail["error"].startswith(_UNANSWERED) for end in ends)
        if waiting > self._in_vain:
            self._in_vain += 1
        else:
            self._mark_charge("charged", entry, ["charged"], [], 1)

    def _mark_charge(self, kind: str, entry: Entry, words: list[str], outcome: list[str], charges: int, **more) -> None:
        again = bool(charges) and self._charges > 0
        self._charges += charges
        words = [*words, *["charged" + " again" * again] * (charges and kind == "charge"), *["again"] * (again and kind == "charged"), *outcome]
        self._add(kind, entry, words, ", ".join(words), again=again, effects=charges, **more)

    def _outbox(self, entry: Entry) -> None:
        event, lane = entry.event, entry.event.lane
        outcome = "failed" if event.phase == steps.FAILED else event.detail.get("outcome", "")
        moved = 0 if outcome == "failed" else 1 if (event.name, outcome) == (steps.OUTBOX_ADD, "added") else -1 if event.name == steps.OUTBOX_MARK else 0
        if moved and entry.tentative:
            self._moved[lane], moved, outcome = self._moved.get(lane, 0) + moved, 0, "not yet durable"
        elif moved:
            outcome = _moved(moved)
        self._add("outbox", entry, [event.name, *[outcome] * bool(outcome)], event.name + (f": {outcome}" if outcome else ""),
                  done=event.phase == steps.AFTER, waiting=moved)

    def _ledger(self, entry: Entry) -> None:
        name, lane, detail = entry.event.turn or entry.event.name, entry.event.lane, entry.event.detail
        effects, moved, outcome = 0, 0, "failed" if entry.event.phase == steps.FAILED else detail.get("outcome", "")
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
            moved = self._moved.pop(lane, 0) if entry.event.turn else 0
            outcome = "recorded" if effects else outcome
        elif name == steps.LEDGER_ROLLBACK:
            self._undo(lane)
        again = bool(effects) and self._effects + effects > 1
        self._effects += effects
        outcomes = [outcome for outcome in ("recorded again" if again else outcome, _moved(moved)) if outcome]
        self._add("ledger", entry, [_short(name), *outcomes], name + (f": {', '.join(outcomes)}" if outcomes else ""),
                  step=name, done=entry.event.phase == steps.AFTER, again=again, effects=effects, waiting=moved)

    def _note(self, entry: Entry) -> None:
        name, lane, detail = entry.event.name, entry.event.lane, entry.event.detail
        reached = self._reached.pop(lane, None)
        if name in ("killed", "exited"):
            if detail.get("by", "hand") == "hand":
                where = "by hand" if "by" in detail else "by itself"
            elif _alone(lane) and self._elsewhere(entry):
                where = "at other work"
            else:
                where = f"before {_short(reached)}" if reached else f"after {_short(self._last.get(lane, ''))}"
            self._add(name, entry, [name, where], f"{lane} {name} {where}")
            self._handling.pop(lane, None)
            self._undo(lane)
        elif name == "raised":
            self._undo(lane)
            kind = plain(detail["error"].split(":", 1)[0])
            self._add("note", entry, ["raised", (kind if len(kind) <= 16 else kind.removesuffix("Error"))[:17]], f"{lane} raised {kind}")
            if _alone(lane):
                self._handling.pop(lane, None)        # a handler's delivery is still to be answered
        else:
            word = "frozen" if name == "stopped" else name
            words = [*word.split("."), *([f"before {_short(reached)}"] if reached and name == "stopped" else [])]
            self._add("note", entry, words, f"{lane}: {' '.join(words)}")

    def _elsewhere(self, entry: Entry) -> bool:
        """Tells whether the last that a process did is not in this trail."""
        lane = [event for event in self._trail.run.events if event.lane == entry.event.lane and (event.name in steps.STEPS or event is entry.event)]
        at = next(at for at, event in enumerate(lane) if event is entry.event)
        return at > 0 and not any(lane[at - 1] is other.event for other in self._trail.entries)

    def _undo(self, lane: str) -> None:
        self._tentative.pop(lane, None)
        self._moved.pop(lane, None)

    def _add(self, kind: str, entry: Entry, words: list[str], said: str, step: str = "", **more) -> None:
        self.moments.append(Moment(kind, entry.event.lane, step or entry.event.name, words, said, self._handling.get(entry.event.lane, 0), **more))


def _short(step: str) -> str:
    return step.removeprefix("ledger.").removeprefix("provider.")


def _alone(lane: str) -> bool:
    """Tells whether it is the lane of a process that no delivery was given to."""
    return lane.split()[0] in (PRODUCER, RELAY)


def _moved(events: int) -> str:
    """What a change of the outbox comes to, in words."""
    return "event waits" if events > 0 else "marked" if events < 0 else ""
