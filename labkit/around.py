"""What is around an effect key on the lanes of producers and relays: it names no key, and yet belongs to it.

A handler's delivery tells of each event which key it is about. A producer has none: its transactions, and what becomes of its
process, concern whatever it wrote and published.
"""

from labkit import steps
from labkit.faults import PRODUCER, RELAY
from labkit.trace import Event

_OVER = ("killed", "exited", "returned", "raised")
_FATES = (*_OVER, "stopped", "continued")


def names(event: Event, key: str) -> bool:
    """Tells whether the event itself names the key."""
    return key in (event.effect_key, event.detail.get("effect_key"))


def places(events: list[Event], key: str) -> set[int]:
    """Returns where among the events those are that belong to the key without naming it."""
    found: set[int] = set()
    lanes: dict[str, _Lane] = {}
    waits = False                                     # the event of the key, in the outbox
    for at, event in enumerate(events):
        role = event.lane.split()[0]
        if role not in (PRODUCER, RELAY):
            continue
        lane = lanes.setdefault(event.lane, _Lane())
        if event.name in _FATES:
            if waits and role == RELAY and event.name != "returned":
                found |= {at, *lane.around, *lane.undone}
            elif lane.touched:
                found.add(at)
        elif names(event, key):
            found |= lane.touch(event)
            if event.phase == steps.AFTER and event.name in (steps.OUTBOX_ADD, steps.OUTBOX_MARK):
                waits = event.name == steps.OUTBOX_ADD
        elif event.name in steps.STEPS and lane.pass_by(at, event):
            found.add(at)
        if lane.inside and lane.concerned and (event.turn == steps.LEDGER_ROLLBACK or event.name in _OVER):
            waits = role == RELAY                     # what a relay marked waits again, and what a producer added is gone
        lane.leave(event)
    return found


class _Lane:
    """Where a process is: in a transaction, and how long since it looked into the outbox."""

    def __init__(self):
        self._transaction: list[int] = []             # places of what names no key in it
        self._look: list[int] = []
        self.undone: list[int] = []                   # what was in a transaction that has just been undone
        self._unconfirmed: set[str] = set()           # ids of events of the key that were sent
        self._raised = False                          # an error, and nothing was done since
        self.inside = False                           # the transaction
        self.concerned = False                        # the transaction, with the key
        self.touched = False                          # the key, since the process was called

    @property
    def around(self) -> set[int]:
        """The places of what leads to whatever comes next."""
        return {*self._transaction, *self._look}

    def touch(self, event: Event) -> set[int]:
        """Hears of the key, and returns the places of what led to it."""
        self.touched = self.concerned = True
        self._raised = False
        if event.name == steps.PUBLISH:
            self._unconfirmed.add(event.detail.get("event_id"))
        elif event.name == steps.CONFIRM:
            self._unconfirmed.discard(event.detail.get("event_id"))
        return self.around

    def pass_by(self, at: int, event: Event) -> bool:
        """Hears of a step that does not name the key, and tells whether it is known to belong to it."""
        if self._raised:                              # it was called again
            self.touched = self._raised = False
        if event.effect_key or "effect_key" in event.detail:
            return False
        if event.name == steps.CONFIRM:               # of all that was sent
            return bool(self._unconfirmed)
        if self.inside:
            self._transaction.append(at)
            return self.concerned
        if event.name == steps.OUTBOX_READ:
            self._look = [at] if event.phase == steps.BEFORE else [*self._look, at]
        elif event.name in (steps.LEDGER_BEGIN, steps.LEDGER_EXECUTE):        # a statement of one's own may begin a transaction
            self._transaction.append(at)
            self.inside = event.turn == steps.LEDGER_BEGIN
        return False

    def leave(self, event: Event) -> None:
        """Forgets what is over with an event."""
        ended = event.phase in (steps.AFTER, steps.FAILED)
        self.undone = self._transaction if event.turn == steps.LEDGER_ROLLBACK else []
        if event.name in _OVER or event.turn in (steps.LEDGER_COMMIT, steps.LEDGER_ROLLBACK) or ended and not self.inside:
            self._transaction, self.inside, self.concerned = [], False, False
        if event.name == steps.CONFIRM and ended and "event_id" not in event.detail:
            self._unconfirmed.clear()
        if event.name in _OVER:                       # one that raised may still exit for it
            self._raised = event.name == "raised"
            self._look, self.touched, self._unconfirmed = [], self.touched and self._raised, set()
