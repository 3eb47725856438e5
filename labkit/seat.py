"""A worker's place in a run: taken by one process after another, known by its number."""

from typing import Any

from labkit.crew import WorkerProcess
from labkit.faults import WORKER


class Seat:
    """What the supervisor knows of one worker.

    role:    of `faults.ROLES`
    running: a handler is at work; idle: it waits for a delivery; hung: "", "for a while" or "for good"
    firing:  the index of the planned fault that waits for the worker's round trip, or that killed it
    asked:   the gate at which the worker stood last
    """

    def __init__(self, number: int, role: str = WORKER):
        self.number, self.role, self.lane = number, role, f"{role} {number}"
        self.called = "the handler" if role == WORKER else self.lane
        self.process: WorkerProcess | None = None
        self.sit(None)

    def sit(self, process: WorkerProcess | None) -> None:
        """Gives the place to a process, which has done nothing yet."""
        self.process = process
        self.deliveries: dict[int, dict[str, Any]] = {}
        self.idle = self.running = self.by_hand = False
        self.hung = ""
        self.firing: int | None = None
        self.asked: dict[str, Any] = {}

    @property
    def at_work(self) -> bool:
        """Tells whether the handler may still do something."""
        return self.running and self.hung != "for good"

    @property
    def about(self) -> dict[str, Any]:
        """The delivery that the worker stood at a gate with, for an event."""
        return {field: self.asked.get(field) for field in ("message_id", "position", "attempt", "tag", "effect_key")}
