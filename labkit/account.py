"""The account of copies: where each published copy is, told by the events as they come.

A copy is named by its position among the published messages. The supervisor asks whether any is still outstanding; the
judgement asks where each one ended. Neither trusts a queue's length before the workers are gone.
"""

from collections import defaultdict

from labkit import steps
from labkit.trace import Event

WAITING, HELD, REJECTED = "waiting", "held", "rejected"                       # outstanding
ACKED, DEAD_LETTERED, DROPPED, VANISHED = "acked", "dead-lettered", "dropped", "vanished"
_OUTSTANDING = {WAITING, HELD, REJECTED}


class Account:
    """Where the copies are. `automatic`: the broker counts a delivery as settled when it is sent."""

    def __init__(self, automatic: bool = False, dead_letter: bool = True):
        self._automatic, self._dead_letter = automatic, dead_letter
        self.where: dict[int, str] = {}
        self.outstanding: set[int] = set()
        self.held: dict[str, dict[int, int]] = defaultdict(dict)              # lane -> tag -> position
        self._last: dict[int, tuple[str, int]] = {}   # position -> lane and tag that it was handed to last

    def move(self, position: int, where: str) -> None:
        """Notes where a copy is now. Its dead letter may be heard of before the reject that made it: it stays."""
        if self.where.get(position) == DEAD_LETTERED:
            return
        self.where[position] = where
        (self.outstanding.add if where in _OUTSTANDING else self.outstanding.discard)(position)

    def take(self, event: Event) -> None:
        """Learns from one event."""
        match event.name, event.phase:
            case "published", _ if event.position not in self.where:         # a confirm may be heard of after the delivery
                self.move(event.position, WAITING)
            case steps.RECEIVE, steps.BEFORE:
                if event.position is not None:
                    self.held[event.lane][event.tag] = event.position
                    self._last[event.position] = event.lane, event.tag
                    self.move(event.position, ACKED if self._automatic else HELD)
            case (steps.ACK | steps.NACK | steps.REJECT), steps.AFTER:
                if event.detail["outcome"] in ("sent", "handled"):
                    self._settle(event)
            case "dead-lettered", _ if event.position is not None:
                self.move(event.position, DEAD_LETTERED)
            case ("channel.closed" | "cancelled" | "connection.lost" | "killed" | "exited"), _:
                self.release(event.lane)

    def release(self, lane: str) -> None:
        """Notes that the broker has back whatever this lane held unanswered."""
        for position in self.held.pop(lane, {}).values():
            if self.where[position] == HELD and not any(position in tags.values() for tags in self.held.values()):
                self.move(position, WAITING)

    def _settle(self, event: Event) -> None:
        held = self.held[event.lane]
        tags = [tag for tag in held if tag <= event.tag] if event.detail.get("multiple") else [event.tag]
        for tag, position in [(tag, held.pop(tag)) for tag in tags if tag in held]:
            if self._last[position] != (event.lane, tag):                     # another worker has it by now, who was heard of sooner
                continue
            if event.name == steps.ACK:
                self.move(position, ACKED)
            elif event.detail.get("requeue"):
                self.move(position, WAITING)
            else:
                self.move(position, REJECTED if self._dead_letter else DROPPED)
