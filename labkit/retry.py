"""Retry or not: what kind of failure it is, and what the policy makes of it. Pure: nothing here waits, publishes or asks a clock.

    policy = RetryPolicy(max_attempts=3, delays_ms=(100, 400), kinds={CardRefused: "terminal"})
    policy.next_action(policy.classify(error), attempt=1, age_ms=20)      # Retry(delay_ms=110)
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from labkit.errors import BrokerError, LedgerError, PlanError
from labkit.message import Unreadable
from labkit.table import count

#: kind of failure -> what it means
KINDS = {
    "temporary": "it may go away by itself: a connection, a lock, a limit",
    "terminal": "it stays: the input is broken, or a rule forbids it",
    "business": "it is no failure but an answer, such as out of stock, and is published as an event",
    "defer": "a condition is not there yet and may come by itself, such as an earlier number",
    "unknown": "nothing is known of it, so a person looks",
}
TEMPORARY, TERMINAL, BUSINESS, DEFER, UNKNOWN = KINDS
#: HTTP's own words for "try again": request timeout, too early, too many requests, and a server or gateway that is away or slow
_TRY_AGAIN = {408, 425, 429, 502, 503, 504}
#: by name, since these libraries need not be there: the error's class, or one of its parents
_TEMPORARY_NAMES = {"AMQPConnectionError", "OperationalError", "PoolTimeout", "ConnectTimeout", "ReadTimeout"}
LONGEST_MS = 24 * 60 * 60 * 1000                     #: of a delay: what waits for longer is for a person
_TIERS = 5                                            # a spread of delays has so many values, since each needs a queue


class UnknownSchema(ValueError):
    """Raised when a message has a schema, or a version of it, that the handler does not know."""


class BrokenRule(ValueError):
    """Raised when what is asked breaks a rule of the business, today and tomorrow."""


class BusinessOutcome(Exception):
    """Raised for an answer of the business that is no failure, such as out of stock."""


def classify(error: BaseException) -> str:
    """Returns the kind of a failure, one of KINDS. What nobody has classified is unknown, and never temporary."""
    if isinstance(error, BusinessOutcome):
        return BUSINESS
    if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, Unreadable, UnknownSchema, BrokenRule, KeyError)):
        return TERMINAL
    status = getattr(error, "code", None) or getattr(error, "status_code", None) or getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 600:
        return TEMPORARY if status in _TRY_AGAIN else UNKNOWN if status >= 500 else TERMINAL
    if isinstance(error, (ConnectionError, TimeoutError, LedgerError, BrokerError)) or _TEMPORARY_NAMES & {parent.__name__ for parent in type(error).__mro__}:
        return TEMPORARY
    return UNKNOWN


@dataclass(frozen=True)
class Retry:
    """The message comes again after a delay."""

    delay_ms: int


@dataclass(frozen=True)
class Terminal:
    """The message leaves the automatic route; `route` says to whom."""

    route: str


@dataclass(frozen=True)
class Defer:
    """The message waits for what it needs, and spends no attempt."""


@dataclass(frozen=True)
class Publish:
    """The answer is published as an event, and the message is done."""


@dataclass(frozen=True)
class RetryPolicy:
    """A budget for what is temporary, and a way out for everything.

    max_attempts: handings-over of one message at most; the first one counts
    delays_ms:    between the attempts, so one fewer at most; the last one serves for those that are left
    jitter:       by which part of itself a delay may be shorter or longer, so that many do not come back at once
    max_age_ms:   a message that would be older at its next attempt is not tried again; None for no bound
    routes:       kind -> where it ends when nothing automatic is left; given ones replace the usual ones
    kinds:        error class -> kind, before `classify` is asked; or a function of the error that returns a kind, or None
    seed:         draws the jitter
    """

    max_attempts: int = 3
    delays_ms: Sequence[int] = (100, 400)
    jitter: float = 0.2
    max_age_ms: int | None = None
    routes: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[type, str] | Callable[[BaseException], str | None] = field(default_factory=dict)
    seed: int = 0

    USUAL_ROUTES = MappingProxyType({TEMPORARY: "manual-review", TERMINAL: "quarantine", UNKNOWN: "manual-review", DEFER: "manual-review"})

    def __post_init__(self):
        if not _whole(self.max_attempts) or self.max_attempts < 1:
            raise PlanError(f"max_attempts is {self.max_attempts!r}.", "the first attempt counts, so 1 is the least", "Write max_attempts=3.")
        delays = tuple(self.delays_ms) if isinstance(self.delays_ms, Sequence) and not isinstance(self.delays_ms, str) else None
        if delays and all(map(_whole, delays)) and max(delays) > LONGEST_MS:
            raise PlanError(f"delays_ms is {self.delays_ms!r}.", f"a message waits for {LONGEST_MS:,} ms at most, which is a day", "Write shorter ones.")
        if delays is None or not all(_whole(delay) and delay > 0 for delay in delays) or not delays and self.max_attempts > 1:
            raise PlanError(f"delays_ms is {self.delays_ms!r}.", "it must hold positive whole numbers, for the time between two attempts",
                            "Write delays_ms=(100,), or more of them.")
        if len(delays) > self.max_attempts - 1:
            have = f"{self.max_attempts} attempts have {count(self.max_attempts - 1, 'delay')} between them" if self.max_attempts > 1 else "1 attempt has no delay"
            raise PlanError(f"{have}, not {len(delays)}.", "the first attempt waits for nothing",
                            f"Write delays_ms={delays[:self.max_attempts - 1]!r}.")
        if not isinstance(self.jitter, (int, float)) or isinstance(self.jitter, bool) or not 0 <= self.jitter < 1:
            raise PlanError(f"jitter is {self.jitter!r}.", "it is the part of a delay by which it may change, from 0 to less than 1", "Write jitter=0.2, or 0 for none.")
        if self.max_age_ms is not None and (not _whole(self.max_age_ms) or self.max_age_ms < 1):
            raise PlanError(f"max_age_ms is {self.max_age_ms!r}.", "it must be a positive whole number", "Leave it out, or write max_age_ms=60_000.")
        if not isinstance(self.routes, Mapping):
            raise PlanError(f"routes is {self.routes!r}.", "a dictionary is expected", 'Write routes={"unknown": "manual-review"}, or leave it out.')
        if unknown := set(self.routes) - set(self.USUAL_ROUTES):
            raise PlanError(f"routes names {sorted(unknown)[0]!r}.", "no such kind ends with a person: " + ", ".join(self.USUAL_ROUTES) + " do", "Leave it out.")
        for kind, route in self.routes.items():
            if not isinstance(route, str) or not route:
                raise PlanError(f"routes[{kind!r}] is {route!r}.", "it is not a text that says to whom", 'Write routes={"unknown": "manual-review"}, or leave it out.')
        object.__setattr__(self, "delays_ms", delays)
        object.__setattr__(self, "routes", {**self.USUAL_ROUTES, **self.routes})
        if not callable(self.kinds):
            errors = self.kinds if isinstance(self.kinds, Mapping) else [self.kinds]
            if wrong := [error for error in errors if not (isinstance(error, type) and issubclass(error, BaseException))]:
                raise PlanError(f"kinds has {wrong[0]!r}.", "it takes classes of errors, or a function of the error", 'Write kinds={CardRefused: "terminal"}.')
            for error, kind in self.kinds.items():
                self._check_kind(kind, f"kinds[{getattr(error, '__name__', error)!r}]")

    def __str__(self) -> str:
        given = [f"max_attempts={self.max_attempts}", f"delays_ms={self.delays_ms}", f"jitter={self.jitter:g}"]
        return f"RetryPolicy({', '.join(given + [f'max_age_ms={self.max_age_ms}'] * (self.max_age_ms is not None))})"

    def classify(self, error: BaseException) -> str:
        """Returns the kind of a failure: as `kinds` says, or else as `classify` does. Raises PlanError for a kind that there is not."""
        if callable(self.kinds):
            kind = self.kinds(error)
        else:
            kind = next((kind for parent in type(error).__mro__ for known, kind in self.kinds.items() if known is parent), None)
        return classify(error) if kind is None else self._check_kind(kind, "the kind")

    def next_action(self, kind: str, attempt: int, age_ms: float, key: str = "", at_least_ms: int = 0) -> Retry | Terminal | Defer | Publish:
        """Returns what follows a failure of this kind.

        attempt: which handing-over failed, 1 the first; age_ms: since the message was published; key: draws the jitter, with the seed;
        at_least_ms: no sooner than that, such as what a service asks for with its Retry-After; more than LONGEST_MS is for a person
        """
        self._check_kind(kind, "the kind")
        if kind == BUSINESS:
            return Publish()
        if kind == DEFER:
            return Defer()
        if kind != TEMPORARY or attempt >= self.max_attempts or at_least_ms > LONGEST_MS:
            return Terminal(self.routes[kind])
        tiers = self.tiers_ms(attempt)
        delay_ms = max(at_least_ms, random.Random(f"{self.seed} {key} {attempt}").choice(tiers))
        if self.max_age_ms is not None and age_ms + delay_ms > self.max_age_ms:
            return Terminal(self.routes[kind])
        return Retry(delay_ms)

    def longest_ms(self, attempt_ms: float) -> float:
        """Returns how long a message is under way at most, when each attempt takes `attempt_ms` and no other message is in its way."""
        delays = sum(max(self.tiers_ms(attempt)) for attempt in range(1, self.max_attempts))
        longest = self.max_attempts * attempt_ms + delays
        return longest if self.max_age_ms is None else min(longest, self.max_age_ms + attempt_ms)

    def tiers_ms(self, attempt: int) -> list[int]:
        """Returns the delays that may follow this attempt, the shortest first: few, since the broker needs a queue for each."""
        delay = self.delays_ms[min(attempt, len(self.delays_ms)) - 1]
        spread = (round(delay * (1 + self.jitter * (2 * tier / (_TIERS - 1) - 1))) for tier in range(_TIERS))
        return sorted({min(max(1, tier_ms), LONGEST_MS) for tier_ms in spread})

    def _check_kind(self, kind: Any, what: str) -> str:
        if not isinstance(kind, str) or kind not in KINDS:
            raise PlanError(f"{what} is {kind!r}.", "it is none of " + ", ".join(KINDS), 'Write one of these, such as "terminal".')
        return kind


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
