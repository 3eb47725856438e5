"""The trail: all that happened to one effect key, in order, as a table and as a picture."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from labkit import around, steps, table
from labkit.result import Run
from labkit.trace import Event

_LANE_ENDS = ("killed", "exited", "connection.lost", "channel.closed", "cancelled")
_OF_THE_LANE = (*_LANE_ENDS, "stopped", "continued")
_SHOWN_FIRST, _SHOWN_LAST = 30, 10


@dataclass(frozen=True)
class Entry:
    """One line of a trail. `event` is the one that ends a step; a step that was reached and not ended has its first.

    attempt:  the delivery's, also where the event itself tells none
    outcome:  what it came to, in words
    tentative: written inside a transaction that is still open
    """

    event: Event
    attempt: int | None
    outcome: str
    tentative: bool = False

    def as_row(self) -> dict[str, object]:
        return {"message": self.event.position, "attempt": self.attempt, "lane": self.event.lane, "what": self.event.name, "outcome": self.outcome}


class Trail:
    """Every delivery, step, kill and decision of one effect key. `rows` holds dictionaries; shown, it is a table."""

    def __init__(self, run: Run, effect_key: str):
        self.run, self.effect_key = run, effect_key
        positions = {position for position, message in enumerate(run.messages, 1) if message.effect_key == effect_key}
        self.copies = len(positions)
        self.entries = list(_entries(_in_order(list(_events_of(run.events, effect_key, positions))), effect_key))

    @property
    def rows(self) -> list[dict[str, object]]:
        """One dictionary a line: message (its position), attempt, lane, what, outcome."""
        return [entry.as_row() for entry in self.entries]

    @property
    def title(self) -> str:
        """The key, its totals and its status, in one line."""
        return self.run.title(self.effect_key)

    def plot(self, ax=None):
        """Draws the trail, one lane a worker."""
        from labkit import plots
        return plots.trail(self.run, self.effect_key, ax)

    def __repr__(self) -> str:
        return f"{self.title}\n{table.text(*self._table())}"

    def _repr_html_(self) -> str:
        return table.markup(self.title, *self._table(), header="what")

    def _table(self) -> tuple[list[str], list[list]]:
        rows = self.rows
        columns = ["message"] * (self.copies > 1) + ["attempt"] * any(row["attempt"] for row in rows) + ["lane", "what", "outcome"]
        if (left_out := len(rows) - _SHOWN_FIRST - _SHOWN_LAST) > 0:
            rows[_SHOWN_FIRST:-_SHOWN_LAST] = [{"what": f"… {left_out} more lines …"}]
        return columns, [[row.get(name) for name in columns] for row in rows]


def _events_of(events: list[Event], key: str, positions: set[int]) -> Iterator[tuple[Event, int | None]]:
    """Yields (event, attempt) for what concerns the key: its own events, what is around them, and what happened to a lane that had its delivery."""
    belonging = around.places(events, key)
    held: dict[str, dict[int, int | None]] = {}       # lane -> tag -> attempt, of deliveries of this key that nobody answered
    under_way: dict[str, int | None] = {}             # lane -> attempt, while a handler is busy with this key
    for at, event in enumerate(events):
        lane, own = event.lane, event.position in positions if event.position else event.effect_key == key
        mine = own or event.detail.get("effect_key") == key or at in belonging
        if lane in held or lane in under_way:
            answered = event.phase == steps.AFTER and event.detail.get("multiple") and min(held.get(lane) or [event.tag + 1]) <= event.tag
            mine = mine or event.name in _OF_THE_LANE or answered
        if mine and event.name != "fenced":
            attempts = [*held.get(lane, {}).values(), under_way.get(lane)]
            yield event, event.attempt or next((attempt for attempt in reversed(attempts) if attempt), None)
        if own and event.name == steps.RECEIVE:
            held.setdefault(lane, {})[event.tag] = under_way[lane] = event.attempt
        elif own and event.name in ("returned", "raised"):
            under_way.pop(lane, None)
        elif event.name in steps.ANSWERS and event.phase == steps.AFTER and event.detail.get("outcome") in ("sent", "handled"):
            tags = held.get(lane, {})
            for tag in [tag for tag in tags if tag == event.tag or (event.detail.get("multiple") and tag <= event.tag)]:
                del tags[tag]
        elif event.name in _LANE_ENDS:
            held.pop(lane, None)
            if event.name in ("killed", "exited"):
                under_way.pop(lane, None)
        if not held.get(lane, True):
            del held[lane]


def _in_order(found: list[tuple[Event, int | None]]) -> list[tuple[Event, int | None]]:
    """Puts what the broker and the relay told into its place by cause: it may be heard of a little sooner or later."""
    ordered = list(found)
    for pair in found:
        event = pair[0]
        if event.name not in ("dead-lettered", "ack.dropped", "publish.dropped", "confirm.dropped"):
            continue
        ordered.remove(pair)
        place = next((at for at, (other, _) in enumerate(ordered) if other.at_ms > event.at_ms), len(ordered))
        if event.name in ("publish.dropped", "confirm.dropped"):
            ordered.insert(_before_its_end(ordered, event, place), pair)
            continue
        received = [at for at, (other, _) in enumerate(ordered) if other.name == steps.RECEIVE and other.position == event.position
                    and other.at_ms <= event.at_ms]
        answers = [at for at, (other, _) in enumerate(ordered) if other.name in steps.ANSWERS and other.phase == steps.AFTER
                   and other.position == event.position and at > (received or [-1])[-1]]
        if answers:
            place = answers[0] + (event.name == "dead-lettered")
        ordered.insert(place, pair)
    return ordered


def _before_its_end(ordered: list[tuple[Event, int | None]], dropped: Event, place: int) -> int:
    """Returns where the publish ends that was dropped, or the wait for the confirm that was; or `place` when it never did."""
    sent = [(at, event.lane) for at, (event, _) in enumerate(ordered) if (event.name, event.phase, event.message_id) ==
            (steps.PUBLISH, steps.BEFORE, dropped.message_id) and event.at_ms <= dropped.at_ms]
    return next((at for at, (event, _) in enumerate(ordered) if sent and at > sent[-1][0] and event.lane == sent[-1][1]
                 and f"{event.name}.dropped" == dropped.name and event.phase != steps.BEFORE), place)


def _entries(found: list[tuple[Event, int | None]], key: str) -> Iterator[Entry]:
    in_transaction: set[str] = set()
    for (event, attempt), (following, _) in zip(found, [*found[1:], (None, None)]):
        ends = following is not None and (following.name, following.lane) == (event.name, event.lane) and following.phase in (steps.AFTER, steps.FAILED)
        if event.phase == steps.BEFORE and ends:
            continue
        if event.turn == steps.LEDGER_BEGIN:
            in_transaction.add(event.lane)
        elif event.turn or event.name in ("returned", "raised", *_LANE_ENDS):
            in_transaction.discard(event.lane)        # what a handler leaves open is undone
        tentative = event.lane in in_transaction and event.turn != steps.LEDGER_BEGIN
        yield Entry(event, attempt, _outcome(event, key, tentative), tentative)


def _outcome(event: Event, key: str, tentative: bool) -> str:
    detail = event.detail
    if event.phase == steps.BEFORE:
        return "reached"
    if event.phase == steps.FAILED:
        return f"failed: {detail['error']}"
    match event.name:
        case steps.RECEIVE:
            return f"redelivered={detail.get('redelivered')}"
        case steps.LEDGER_RECORD | steps.LEDGER_RECORD_ONCE:
            said = detail.get("outcome", "recorded")
            other = detail.get("effect_key", event.effect_key)
            said += f" for {other}" if other != key else f", while handling {event.effect_key}" if event.effect_key != key else ""
            return said + (", not committed yet" if tentative and said.startswith("recorded") else "")
        case steps.OUTBOX_ADD if tentative and not event.position:
            return f"{detail.get('outcome')}, not committed yet"
        case steps.LEDGER_EXECUTE:
            return table.plain(" ".join(detail["statement"].split()))
        case steps.ACK | steps.NACK | steps.REJECT:
            return ", ".join([str(detail.get("outcome")), *[f"{name}={detail[name]}" for name in ("requeue", "multiple") if detail.get(name) is not None
                                                            and (name, detail[name]) != ("multiple", False)]])
        case steps.PROVIDER_CHARGE:                   # the name of a charge differs from run to run
            return "charged"
        case "charged":
            return "and nobody heard of it"
        case "published":
            return "confirmed"
        case "killed" | "stopped" if "by" in detail:
            return f"by {detail['by']}"
        case "killed" | "exited":
            return "by itself" + (f", with status {detail['status']}" if detail.get("status", -1) >= 0 else "")
        case "raised":
            return detail["error"] + (f" ({detail['kind']})" if "kind" in detail else "")
        case steps.RETRY_PUBLISH:
            return f"{detail['outcome']}, in {detail['delay_ms']:,} ms" + (f": {detail['reason']}" if detail["reason"] else "")
        case steps.TERMINAL_RECORD:
            return f"{detail['outcome']}, for {detail['route']}" + (f": {detail['reason']}" if detail["reason"] else "")
        case "dead-lettered":
            return detail["reason"]
        case "ack.dropped":
            return detail["relay"]
        case "channel.closed":                        # a queue's name differs from run to run
            return re.sub(r"'[^']*'", "'…'", f"{detail['code']} {detail['text']}")
        case _:
            return str(detail.get("outcome", "" if event.phase == steps.NOTE else "done"))
