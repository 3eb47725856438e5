"""Stepping: lets one worker through one gate at a time, so that the order of the workers' steps is chosen and not chance.

Every worker asks at every gate. While one of them moves, the others stand; when all stand, the order says who goes next.
A worker that finds the ledger locked by another waits: that is no step, and it may try again once the lock can be free.
"""

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

from labkit import steps
from labkit.errors import LedgerLocked
from labkit.firing import Firing
from labkit.seat import Seat

#: after these the lock of the ledger's database may be free
_LET_GO = (steps.LEDGER_COMMIT, steps.LEDGER_ROLLBACK, steps.LEDGER_EXECUTE)


class Stepping(Firing):
    """The gates of one schedule. `choices` tells, for each choice, the workers that could go and the one that went."""

    armed = None

    def __init__(self, order: Sequence[int], seed: int | None, workers: int, note: Callable[..., None]):
        """order: the worker to let through at each choice; where it ends, one drawn by the seed, or without one the first that can go."""
        super().__init__((), note)
        self._order, self._seed, self._workers = order, seed, workers
        self._standing: dict[int, Seat] = {}          # at a gate, and could go
        self._waiting: dict[int, Seat] = {}           # for the lock
        self._finished: set[int] = set()
        self._inside: set[int] = set()                # a transaction

    def ask(self, seat: Seat, asked: dict[str, Any]) -> None:
        """Hears that a worker stands at a gate; it is answered when its turn comes."""
        seat.asked = asked
        self._finished.discard(seat.number)
        match asked["phase"]:
            case steps.BEFORE:
                self._standing[seat.number] = seat
            case steps.WAITING:
                self._waiting[seat.number] = seat
                self.choices[-1] = [seat.number], seat.number                 # nothing happened: whoever else could go still can
            case steps.AFTER:
                if asked["step"] == steps.LEDGER_BEGIN:
                    self._inside.add(seat.number)
                if asked["step"] in _LET_GO:
                    self._inside.discard(seat.number)
                    self._let_try_again()
                seat.process.tell({"t": "answer", "do": "go"})
        self._choose()

    def finish(self, seat: Seat) -> None:
        """Hears that a worker has nothing more to do."""
        self._standing.pop(seat.number, None)
        self._waiting.pop(seat.number, None)
        self._finished.add(seat.number)
        self._inside.discard(seat.number)
        self._let_try_again()
        self._choose()

    def _let_try_again(self) -> None:
        self._standing |= self._waiting
        self._waiting.clear()

    def _choose(self) -> None:
        if len(self._standing) + len(self._waiting) + len(self._finished) < self._workers:
            return                                    # one of them moves
        if self._standing:
            can, turn = sorted(self._standing), len(self.choices)
            goes = self._order[turn] if turn < len(self._order) and self._order[turn] in can else self._draw(can)
            self.choices.append((can, goes))
            self._standing.pop(goes).process.tell({"t": "answer", "do": "go"})
        elif self._waiting:                           # for each other, as a database would tell one of them
            _, seat = self._waiting.popitem()
            seat.process.tell({"t": "answer", "do": "raise"}, pickle.dumps(LedgerLocked()))

    def _draw(self, can: list[int]) -> int:
        """Returns who goes: best one whom another's transaction may keep waiting, since whether it does then shows in this run."""
        can = [number for number in can if self._inside - {number}] or can
        return can[0] if self._seed is None else random.Random(f"{self._seed} {self.choices}").choice(can)
