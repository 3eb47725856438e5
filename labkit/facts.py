"""The facts of a run: what is known at its end, as plain data. `result` derives the rest from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Facts:
    """What is known at the end of a run.

    settings:  the arguments of `Lab.run` that shaped it, and "broker", its version
    planned:   the planned faults in words; fired: how often each of them fired
    effects:   effect key -> rows in the ledger; None when the ledger could not be asked
    inherited: the same at the start, in a run that goes on with the ledger of an earlier one
    where:     position -> where its copies ended, as in `account`; None when the broker could not be asked
    ending:    "over", "deadline", "max_deliveries", "gave up", "stopped" or "unreachable", with `reason` in words
    choices:   in a stepped run, for each turn: the workers that could go, and the one that went
    published: what handlers or a producer published and the broker held at the end, in its order, as fields of `Message`
    charges:   effect key -> charges that the provider made in this run; None when it could not be asked
    outbox:    effect key -> events of a producer's outbox that are not published yet
    records:   the terminal records in the ledger, as fields of `sql.RECORD_COLUMNS`
    printed:   what the handlers printed, cut at a bound; printed_bytes: how much it was
    """

    settings: Mapping[str, Any]
    planned: list[str]
    fired: list[int]
    effects: dict[str, int] | None
    where: dict[int, list[str]] | None
    ending: str
    reason: str = ""
    printed: str = ""
    printed_bytes: int = 0
    errors: list[str] = field(default_factory=list)
    misuse: str = ""
    stuck: str = ""
    inherited: dict[str, int] = field(default_factory=dict)
    choices: list[tuple[list[int], int]] = field(default_factory=list)
    published: list[dict[str, Any]] = field(default_factory=list)
    outbox: dict[str, int] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    charges: dict[str, int] | None = field(default_factory=dict)
