"""How the provider behaves: a way, its numbers, and what comes after it. Pure: nothing here waits or asks a clock."""

import collections
import difflib
import math
from dataclasses import dataclass
from typing import Any

from labkit.errors import PlanError

#: how the provider can behave -> what a caller meets
BEHAVIOURS = {
    "well": "it charges and answers 200, after `ms` of work",
    "down": "nobody listens: the connection is refused",
    "slow": "it charges and answers 200, but only after `ms`",
    "busy": "it answers 429 at once, with a Retry-After of `retry_after_s`, and charges nothing",
    "broken": "it answers 500 at once, and charges nothing",
    "silent": "it charges and never answers",
}
WELL, DOWN, SLOW, BUSY, BROKEN, SILENT = BEHAVIOURS
#: number -> what it does, and whether it must be whole
_NUMBERS = {"ms": False, "calls": True, "at_once": True, "limit_per_s": True, "retry_after_s": True}


@dataclass(frozen=True)
class Behaviour:
    """One way to behave. See `Provider.behave` for the numbers."""

    how: str = WELL
    ms: float = 0
    calls: int | None = None
    at_once: int | None = None
    limit_per_s: int | None = None
    retry_after_s: int = 1

    @property
    def recovered(self) -> "Behaviour":
        """What follows a bad behaviour: well, within the same limits."""
        return Behaviour(WELL, 0 if self.how == SLOW else self.ms, at_once=self.at_once, limit_per_s=self.limit_per_s)


def planned(how: str, numbers: dict[str, Any]) -> Behaviour:
    """Returns the behaviour that is meant. Raises PlanError for one that there is not."""
    if how not in BEHAVIOURS:
        near = difflib.get_close_matches(str(how), BEHAVIOURS, 1)
        raise PlanError(f"The provider cannot behave {how!r}.", f"perhaps {near[0]!r} is meant" if near else "there is no such behaviour",
                        "It behaves in one of these ways: " + ", ".join(BEHAVIOURS) + ".")
    for name, value in numbers.items():
        if name not in _NUMBERS:
            near = difflib.get_close_matches(name, _NUMBERS, 1)
            raise PlanError(f"The provider has no number {name!r}.", f"perhaps {near[0]!r} is meant" if near else "a misspelt name",
                            "The numbers are: " + ", ".join(_NUMBERS) + ".")
        kinds = int if _NUMBERS[name] else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise PlanError(f"{name} is {value!r}.", f"it must be a positive {'whole ' * _NUMBERS[name]}number", f"Leave it out, or write {name}=1.")
    if how == WELL and "calls" in numbers:
        raise PlanError(f"calls is {numbers['calls']} for a provider that behaves well.", "it is the number of calls after which it recovers, and here is nothing to recover from",
                        'Leave it out, or write behave("broken", calls=3).')
    if how == SLOW and "ms" not in numbers:
        raise PlanError("It is not said how slow the provider is.", "ms is missing", 'Write behave("slow", ms=300).')
    if how != BUSY and "retry_after_s" in numbers:
        raise PlanError(f"retry_after_s is {numbers['retry_after_s']} for a provider that behaves {how!r}.", "only one that is busy says when to come again",
                        'Leave it out, or write behave("busy", retry_after_s=2).')
    return Behaviour(how, **numbers)


class Limit:
    """So many calls within any second, and no more. What is turned away does not count."""

    def __init__(self, per_s: int):
        self._taken: collections.deque[float] = collections.deque(maxlen=per_s)

    def takes(self, now_ms: float) -> bool:
        """Tells whether a call that comes now is taken, and counts it if it is."""
        if len(self._taken) == self._taken.maxlen and now_ms - self._taken[0] < 1000:
            return False
        self._taken.append(now_ms)
        return True
