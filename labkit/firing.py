"""Firing the planned faults: the supervisor's tokens, matched at the gates and spent once.

A worker that asks at a gate waits for the answer, so a fault fires exactly there. Before a kill, a freeze or a cut the
worker makes a round trip on its channel: what it had sent before is then known to have arrived.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from labkit.faults import Fault
from labkit.relay import Relay
from labkit.seat import Seat


class Firing:
    """The faults of one run. `fired` counts, for each planned fault, how often it is proven to have happened."""

    def __init__(self, planned: Sequence[Fault], note: Callable[..., None]):
        """note(name, lane, detail=…, **about) writes an event."""
        self.planned, self.fired = planned, [0] * len(planned)
        self.relay: Relay | None = None
        self.choices: list[tuple[list[int], int]] = []                        # of turns, which only a stepped run has
        self._note, self._spent, self._passed = note, [0] * len(planned), Counter()

    @property
    def armed(self) -> list[tuple[str, str]]:
        """The (step, phase) pairs at which workers must ask."""
        return sorted({(fault.step, fault.phase) for fault in self.planned})

    @property
    def needs_relay(self) -> bool:
        """Tells whether something is to be lost on the way."""
        return any(fault.kind == "lose" for fault in self.planned)

    def ask(self, seat: Seat, asked: dict[str, Any]) -> None:
        """Answers a worker that stands at a gate."""
        seat.asked = asked = {**asked, "worker": seat.number, "role": seat.role, "lane": seat.lane}
        for index, fault in enumerate(self.planned):
            if self._spent[index] < fault.times and fault.concerns(asked):
                self._passed[index, asked["message_id"]] += 1
                if self._passed[index, asked["message_id"]] >= fault.nth:
                    self._spent[index] += 1
                    seat.firing = index
                    if fault.kind == "fail":
                        self.fire(seat)
                    else:
                        seat.process.tell({"t": "answer", "do": "fence"})
                    return
        seat.process.tell({"t": "answer", "do": "go"})

    def fire(self, seat: Seat) -> None:
        """Does what is planned to a worker that has made its round trip."""
        index, process = seat.firing, seat.process
        fault = self.planned[index]
        match fault.kind:
            case "crash":
                process.signal(signal.SIGKILL)        # counted when the exit status proves it
                return
            case "hang":
                process.signal(signal.SIGSTOP)
                process.tell({"t": "answer", "do": "go"})
                self._note("stopped", seat.lane, {"by": str(fault)}, **seat.about)
                seat.hung = "for a while" if fault.seconds is not None else "for good"
                if fault.seconds is not None:
                    asyncio.get_running_loop().call_later(fault.seconds, self._let_go_on, seat, process)
            case "fail":
                process.tell({"t": "answer", "do": "raise"}, cloudpickle.dumps(fault.error))
            case "lose":
                about = seat.about
                what, where = fault.what, seat.asked["where"]         # None where there is no connection: then nothing can be lost
                if where:
                    self.relay.arm(what, *where, lambda: self._lost(index, what, about))
                process.tell({"t": "answer", "do": "lose"})
        seat.firing = None
        if fault.kind != "lose":                      # which the relay proves
            self.fired[index] += 1

    def finish(self, seat: Seat) -> None:
        """Hears that a worker has nothing more to do."""

    def prove_crash(self, seat: Seat) -> bool:
        """Counts the crash that was planned for this seat, now that its process ended by signal 9; tells whether one was."""
        if seat.firing is None:
            return False
        self.fired[seat.firing] += 1
        self._note("killed", seat.lane, {"by": str(self.planned[seat.firing])}, **seat.about)
        return True

    def _let_go_on(self, seat: Seat, process: Any) -> None:
        if seat.process is process and process.exit_status is None:
            process.signal(signal.SIGCONT)
            self._note("continued", seat.lane)
            seat.hung = ""

    def _lost(self, index: int, what: str, about: dict[str, Any]) -> None:
        self.fired[index] += 1
        self._note(f"{what}.dropped", "broker", {"relay": self.relay.log[-1]}, **about)
