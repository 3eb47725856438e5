"""A run that is under way: it can be looked at, hurt, stopped and waited for."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from labkit import controller, ledger
from labkit.errors import LedgerError, PlanError
from labkit.facts import Facts
from labkit.plan import Plan
from labkit.result import Run
from labkit.terminal import records_so_far


class Live:
    """What `Lab.start` returns. Its methods may be called from any thread."""

    def __init__(self, plan: Plan, supervisor: Coroutine):
        self._plan, self._supervisor, self._stopped = plan, None, False
        self._inherited = ledger.count_effects_so_far(plan.ledger)
        self._work = controller.Work(self._carry_out(supervisor))

    @property
    def done(self) -> bool:
        """Tells whether the run is over."""
        return self._work.done

    @property
    def plan(self) -> Plan:
        """What is being run."""
        return self._plan

    @property
    def supervisor(self) -> Any:
        """Who carries the run out, for the controller thread only; None before it has begun."""
        return self._supervisor

    async def over(self, timeout_s: float) -> None:
        """Returns, on the controller thread, when the run is over or the time has passed."""
        await self._work.over(timeout_s)

    def wait(self) -> Run:
        """Returns the judged run when it is over. An interrupt stops the run and cleans up."""
        return self._work.wait()

    def kill(self, worker: int = 1) -> None:
        """Kills a worker process by SIGKILL; the supervisor replaces it."""
        if not 1 <= worker <= self._plan.workers:
            raise PlanError(f"There is no worker {worker}.", f"this run has {self._plan.workers}", "Name one of them; they are numbered from 1.")
        controller.loop().call_soon_threadsafe(lambda: self._supervisor and self._supervisor.kill(worker))

    def stop(self) -> None:
        """Ends the run where it stands; its verdict is then unknown, unless it is broken already."""
        controller.loop().call_soon_threadsafe(self._stop)

    def end(self) -> None:
        """Stops the run and returns when it has cleaned up; how it ended stays with `wait`."""
        self.stop()
        self._work.settle()

    @property
    def counts(self) -> dict[str, int]:
        """The counts so far, as in `Run.counts`; a key whose message is still on its way counts as pending."""
        return self._so_far().counts

    def __repr__(self) -> str:
        return repr(self.wait()) if self.done else f"<a run under way: {self._so_far().counts}>"

    async def _carry_out(self, supervisor: Coroutine) -> Run:
        self._supervisor = await supervisor
        if self._stopped:
            self._supervisor.stop()
        facts = await self._supervisor.carry_out()
        return self._judged(sorted(self._supervisor.events, key=lambda event: event.at_ms), facts, await asyncio.to_thread(_asked, self._plan.ask, self._plan.ledger))

    def _stop(self) -> None:
        self._stopped = True                          # the supervisor may not be there yet
        if self._supervisor:
            self._supervisor.stop()

    def _so_far(self) -> Run:
        events, fired, where, charges = controller.carry_out(self._look())
        return self._judged(events, Facts(self._plan.settings(), [str(fault) for fault in self._plan.faults], fired, None, where,
                                          "stopped", "the run is under way", charges=charges),
                            _asked(lambda: {"effects": ledger.count_effects_so_far(self._plan.ledger), "records": records_so_far(self._plan.ledger)}, self._plan.ledger))

    async def _look(self) -> tuple[list, list, dict, dict | None]:
        return (*self._supervisor.look(), await self._supervisor.charges_so_far()) if self._supervisor else ([], [], {}, {})

    def _judged(self, events: list, facts: Facts, asked: dict[str, Any]) -> Run:
        return self._plan.result(list(self._plan.messages), events, replace(facts, **asked, inherited=self._inherited), self._plan.ledger)


def _asked(ask: Callable[[], dict[str, Any]], place: Any) -> dict[str, Any]:
    """Returns what the ledger was asked; nothing, which makes every status unknown, when it is away, or holds no such table any more."""
    try:
        return ask()
    except (LedgerError, place.Error):
        return {}
