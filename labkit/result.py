"""The result of a run: what was counted, where each effect key stands, and the verdict that follows.

A `Run` holds plain facts (messages, events, effect rows, how it ended) and derives the rest, so that a saved run is
judged again by the same rules, without a broker.
"""

import json
import os
import pathlib
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from typing import Any

from labkit import account, steps
from labkit.databases import SqlitePlace
from labkit.errors import LedgerError, PlanError
from labkit.facts import Facts
from labkit.faults import WORKER
from labkit.message import Message
from labkit.table import count, plain
from labkit.trace import Event

#: every status that an effect key can end with -> its rule
STATUSES = {
    "once": "one effect, and nothing of it left to be delivered",
    "duplicated": "more than one effect, or more than one charge",
    "lost": "no effect, and no message or record of it anywhere",
    "terminal": "no effect, and the message is with a person",
    "pending": "at most one effect, and a message of it still waiting",
    "unknown": "the broker, the ledger or the provider could not be asked",
}
_ALSO = (("charges", "charge"), ("stray", "stray effect"), ("retries", "retry"), ("records", "terminal record"), ("dead_lettered", "dead-lettered"))


class Run:
    """One run, over. `verdict` and `why` say what it proves; `counts` and `trail` show it; `plot` draws it."""

    STATUSES, SWEPT = STATUSES, ("deliveries", "effects")                     # what a sweep shows beside the status, and a picture against each other
    role, ORDER = WORKER, "published"                 # whom the faults are planned for, where they do not say it; the order of the keys
    COLUMNS, KEPT = ("effect key", "deliveries", "effects", "status"), "every effect is accounted for"

    def __init__(self, messages: list[Message], events: list[Event], facts: Facts, ledger: Any = None):
        self.messages, self.events, self.facts, self.ledger = messages, events, facts, ledger
        if sum(self.counts[status] for status in self.STATUSES) != self.counts["keys"]:
            raise AssertionError(f"the statuses do not add up to the keys: {self.counts}")

    @cached_property
    def statuses(self) -> dict[str, str]:
        """Effect key -> status, in the order in which the keys were published."""
        return {key: self._status(key) for key in self._positions}

    @cached_property
    def counts(self) -> dict[str, int]:
        """The numbers of this run: messages, deliveries, effects, and how many keys have each status."""
        effects, tally = self.facts.effects or {}, Counter(self.statuses.values())
        return {"published": sum(event.name == "published" for event in self.events), "keys": len(self._positions),
                "deliveries": sum(self.deliveries.values()), "effects": sum(effects.get(key, 0) for key in self._positions),
                "charges": sum((self.facts.charges or {}).get(key, 0) for key in self._positions),
                "stray": sum(self.strays.values()), "retries": sum(self.retries.values()), "records": len(self.records),
                "dead_lettered": sum(places.count(account.DEAD_LETTERED) for places in (self.facts.where or {}).values()),
                **{status: tally[status] for status in STATUSES}}

    @cached_property
    def deliveries(self) -> dict[str, int]:
        """Effect key -> handlers entered for it."""
        found = Counter(event.effect_key for event in self.events if event.name == steps.RECEIVE and event.phase == steps.AFTER)
        return {key: found[key] for key in self._positions}

    @cached_property
    def retries(self) -> dict[str, int]:
        """Effect key -> how often a message of it was published again, and confirmed."""
        found = Counter(event.effect_key for event in self.events
                        if event.name == steps.RETRY_PUBLISH and event.phase == steps.AFTER and event.detail["outcome"] == "confirmed")
        return {key: found[key] for key in self._positions}

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The terminal records of this run's messages, the oldest first."""
        return [record for record in self.facts.records if self._key_of(record)]

    @cached_property
    def strays(self) -> dict[str, int]:
        """Effect key that nobody published -> effects that this run recorded for it."""
        new = Counter(self.facts.effects or {}) - Counter(self.facts.inherited)
        return {key: rows for key, rows in new.items() if key not in self._positions}

    @property
    def name(self) -> str:
        """The name of the handler, or of the producer."""
        return self.facts.settings.get("handler") or self.facts.settings["producer"]

    @cached_property
    def published(self) -> list[Message]:
        """What handlers or producers published, as the broker held it at the end, in its order; copies too."""
        return [Message(**fields) for fields in self.facts.published]

    @property
    def total(self) -> str:
        """The totals in one line, such as "5 messages · 6 deliveries · 6 effects"."""
        counts = self.counts
        said = [count(counts["published"], "message"), count(counts["deliveries"], "delivery"),
                count(None if self.facts.effects is None else counts["effects"], "effect")]
        return " · ".join(said + [count(counts[name], noun) for name, noun in _ALSO if counts[name]])

    def pair(self, key: str) -> tuple[int, int]:
        """The two numbers of one key that SWEPT names."""
        return self.deliveries[key], (self.facts.effects or {}).get(key, 0)

    @property
    def columns(self) -> tuple[str, ...]:
        """COLUMNS, and one for the charges where the provider made some."""
        return (*self.COLUMNS[:-1], *["charges"] * (self.facts.charges != {}), self.COLUMNS[-1])

    def row(self, key: str) -> list[Any]:
        """The values of one key, as `columns` names them."""
        charges = [] if self.facts.charges == {} else ["?" if self.facts.charges is None else self.facts.charges.get(key, 0)]
        return [key, self.deliveries[key], "?" if self.facts.effects is None else self.facts.effects.get(key, 0), *charges, self.statuses[key]]

    def title(self, key: str) -> str:
        """The key, its numbers and its status, in one line."""
        effects = None if self.facts.effects is None else self.facts.effects.get(key, 0)
        charges = f"{count(self.facts.charges.get(key, 0), 'charge')}, " if self.facts.charges else ""
        return f"{plain(key)}: {count(self.deliveries[key], 'delivery')}, {count(effects, 'effect')}, {charges}{self.statuses[key]}"

    def missing(self, key: str) -> tuple[str, str, list[str], str] | None:
        """What is missing of a key in the end: (lane, step, words, sentence), as a picture shows it; None when nothing is."""
        return ("ledger", "lost", ["lost"], "no effect in the ledger") if self.statuses[key] == "lost" else None

    @property
    def verdict(self) -> str:
        """"holds", "broken" or "unknown"."""
        return self._judgement[0]

    @property
    def why(self) -> str:
        """The reason for the verdict, in one sentence."""
        return self._judgement[1]

    @property
    def evidence(self) -> list[Event]:
        """The shortest list of events that shows the verdict."""
        return self._judgement[2]

    @cached_property
    def measures(self) -> "Measures":
        """The mean handling time, and beside it what shows that a few messages hold the worker."""
        from labkit.gauge import measure
        return measure(self)

    def trail(self, effect_key: str) -> "Trail":
        """Returns every event of one effect key, as a table with a plot."""
        from labkit.report import Trail
        if effect_key not in self.statuses:
            raise PlanError(f"No message of this run has the effect key {effect_key!r}.", "a misspelt key",
                            "The keys are: " + ", ".join(map(plain, list(self.statuses)[:10])) + ".")
        return Trail(self, effect_key)

    def query(self, statement: str, parameters: tuple = ()) -> list[tuple]:
        """Asks the run's ledger in SQL, with ? for each parameter, and returns the rows. Read-only. Raises LedgerError when it is gone."""
        if not self.ledger:
            raise LedgerError("This run has no ledger.", "it was made without one", "Ask a run that `lab.run` returned.")
        return self.ledger.query(statement, parameters)

    def plot(self, ax=None):
        """Draws the run: the trail of its most telling key for a few keys, deliveries against effects for many."""
        from labkit import plots
        return plots.run(self, ax)

    def save(self, folder: str | os.PathLike) -> pathlib.Path:
        """Writes the run into a new or empty folder: run.json, events.jsonl and the ledger's database."""
        folder = pathlib.Path(folder)
        if folder.exists() and not folder.is_dir():
            raise PlanError(f"{folder.name} is a file.", "a run is saved as a folder", "Name another one.")
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise PlanError(f"The folder {folder.name} is not empty.", "a run was saved there before", "Name another folder.")
        if self.ledger:
            with suppress(LedgerError):               # it is gone; what was counted in it is in run.json
                self.ledger.save(folder / "ledger.db")
        with open(folder / "events.jsonl", "w") as file:
            file.writelines(json.dumps(asdict(event)) + "\n" for event in self.events)
        (folder / "run.json").write_text(json.dumps({"messages": [message.as_dict() for message in self.messages],
                                                     "facts": asdict(self.facts)}, indent=1))
        return folder

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "Run":
        """Reads a saved run and judges it again; needs no broker."""
        folder = pathlib.Path(folder)
        try:
            data = json.loads((folder / "run.json").read_text())
            events = [Event(**json.loads(line)) for line in open(folder / "events.jsonl")]
            facts = data["facts"]
            facts["where"] = facts["where"] and {int(position): where for position, where in facts["where"].items()}
            if "producer" in facts["settings"]:
                from labkit.production import Production as cls
            return cls([Message(**message) for message in data["messages"]], events, Facts(**facts), SqlitePlace(folder / "ledger.db"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(f"There is no saved run in {folder.name}.", f"{type(error).__name__}: {error}",
                            "Name the folder that was given to `run.save`.") from None

    def __repr__(self) -> str:
        from labkit import report
        return report.run_text(self)

    def _repr_html_(self) -> str:
        from labkit import report
        return report.run_html(self)

    @cached_property
    def _positions(self) -> dict[str, list[int]]:
        positions = defaultdict(list)
        for position, message in enumerate(self.messages, 1):
            positions[message.effect_key].append(position)
        return dict(positions)

    def _status(self, key: str) -> str:
        if self.facts.effects is None or self.facts.where is None:
            return "unknown"
        effects, where = self.facts.effects.get(key, 0), {where for p in self._positions[key] for where in self.facts.where.get(p, [account.WAITING])}
        if effects > 1 or (self.facts.charges or {}).get(key, 0) > 1:
            return "duplicated"
        if self.facts.charges is None:
            return "unknown"
        if where & account.OUTSTANDING:
            return "pending"
        if effects == 1:
            return "once"
        return "terminal" if account.DEAD_LETTERED in where or any(self._key_of(record) == key for record in self.records) else "lost"

    def _key_of(self, record: dict[str, Any]) -> str | None:
        """Returns the effect key of a record's message; None for one of another run, whose ledger this one goes on with."""
        return self._keys_by_id.get(record["message_id"]) if record["effect_key"] not in self._positions else record["effect_key"]

    @cached_property
    def _keys_by_id(self) -> dict[str, str]:
        return {message.message_id: message.effect_key for message in self.messages}

    @cached_property
    def _judgement(self) -> tuple[str, str, list[Event]]:
        from labkit.verdict import judge
        return judge(self)
