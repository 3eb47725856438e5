"""The account of copies: where each published copy is, told by the events as they come.

A copy is named by its position among the published messages, and by the attempt that published it again; 0 is the copy that the lab
published. The supervisor asks whether any is still outstanding; the judgement asks where each one ended. Neither trusts a queue's
length before the workers are gone.
"""

from collections import Counter, defaultdict

from labkit import steps
from labkit.trace import Event

WAITING, DELAYED, HELD, REJECTED = "waiting", "delayed", "held", "rejected"   # outstanding
ACKED, DEAD_LETTERED, DROPPED, VANISHED = "acked", "dead-lettered", "dropped", "vanished"
OUTSTANDING = {WAITING, DELAYED, HELD, REJECTED}
#: outcomes of a publish after which the broker has the copy, or may have it
MAY_COME = ("confirmed", "unknown", "blocked")

Copy = tuple[int, int]


class Account:
    """Where the copies are. `automatic`: the broker counts a delivery as settled when it is sent."""

    def __init__(self, automatic: bool = False, dead_letter: bool = True):
        self._automatic, self._dead_letter = automatic, dead_letter
        self.where: dict[Copy, str] = {}
        self.outstanding: set[Copy] = set()
        self.open: Counter[int] = Counter()           # position -> its copies that are outstanding, where there are any
        self.due_ms: dict[Copy, float] = {}           # of each copy that is delayed: when it comes back, on the clock of the events
        self.held: dict[str, dict[int, Copy]] = defaultdict(dict)             # lane -> tag -> copy
        self._last: dict[Copy, tuple[str, int]] = {}  # copy -> lane and tag that it was handed to last
        self._under_way: dict[str, tuple[Copy, int]] = {}                     # lane -> the copy that it publishes again, and the delay in ms

    @property
    def places(self) -> dict[int, list[str]]:
        """Position -> where its copies are, in the order in which they were published."""
        places = defaultdict(list)
        for (position, _), where in sorted(self.where.items()):
            places[position].append(where)
        return dict(places)

    def move(self, copy: Copy, where: str) -> None:
        """Notes where a copy is now. Its dead letter may be heard of before the reject that made it: it stays."""
        if self.where.get(copy) == DEAD_LETTERED:
            return
        self.where[copy] = where
        if where != DELAYED:
            self.due_ms.pop(copy, None)
        if (where in OUTSTANDING) == (copy in self.outstanding):
            return
        (self.outstanding.add if where in OUTSTANDING else self.outstanding.discard)(copy)
        self.open[copy[0]] += 1 if where in OUTSTANDING else -1
        if not self.open[copy[0]]:
            del self.open[copy[0]]

    def take(self, event: Event) -> None:
        """Learns from one event."""
        copy = event.position, event.detail.get("copy", 0)
        match event.name, event.phase:
            case "published", _ if copy not in self.where:                    # a confirm may be heard of after the delivery
                self.move(copy, WAITING)
            case steps.RECEIVE, steps.BEFORE:
                if event.position is not None:
                    self.held[event.lane][event.tag] = copy
                    self._last[copy] = event.lane, event.tag
                    self.move(copy, ACKED if self._automatic else HELD)
            case steps.RETRY_PUBLISH, steps.BEFORE if event.position is not None:
                self._under_way[event.lane] = (event.position, event.attempt), event.detail["delay_ms"]
            case steps.RETRY_PUBLISH, _:
                self._publish_again(event, event.detail.get("outcome") in MAY_COME)
            case (steps.ACK | steps.NACK | steps.REJECT), steps.AFTER:
                if event.detail["outcome"] in ("sent", "handled"):
                    self._settle(event)
            case "dead-lettered", _ if event.position is not None:
                self.move(copy, DEAD_LETTERED)
            case ("channel.closed" | "cancelled" | "connection.lost" | "killed" | "exited"), _:
                if event.name in ("killed", "exited"):
                    self._publish_again(event, event.detail.get("by", "hand") == "hand")                    # a planned kill comes before the publish, or after it
                self.release(event.lane)

    def put_off(self, due_ms: float) -> None:
        """Notes that nothing that is delayed is due sooner than this."""
        self.due_ms = {copy: max(due_ms, due) for copy, due in self.due_ms.items()}

    def release(self, lane: str) -> None:
        """Notes that the broker has back whatever this lane held unanswered."""
        for copy in self.held.pop(lane, {}).values():
            if self.where[copy] == HELD and not any(copy in tags.values() for tags in self.held.values()):
                self.move(copy, WAITING)

    def _publish_again(self, event: Event, may_come: bool) -> None:
        """Notes the end of this lane's publish, after which the broker may have the copy; it may be heard of after the copy has come back.

        The delay is counted from here: a worker may stand still for long before it publishes.
        """
        copy, delay_ms = self._under_way.pop(event.lane, (None, 0))
        if copy and may_come and copy not in self.where:
            self.due_ms[copy] = event.at_ms + delay_ms
            self.move(copy, DELAYED)

    def _settle(self, event: Event) -> None:
        held = self.held[event.lane]
        tags = [tag for tag in held if tag <= event.tag] if event.detail.get("multiple") else [event.tag]
        for tag, copy in [(tag, held.pop(tag)) for tag in tags if tag in held]:
            if self._last[copy] != (event.lane, tag):                         # another worker has it by now, who was heard of sooner
                continue
            if event.name == steps.ACK:
                self.move(copy, ACKED)
            elif event.detail.get("requeue"):
                self.move(copy, WAITING)
            else:
                self.move(copy, REJECTED if self._dead_letter else DROPPED)
