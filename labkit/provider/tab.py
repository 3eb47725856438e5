"""The tab: what one run has to do with the provider. Opened when a worker of the run first asks where the provider is."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from labkit.errors import LabError
from labkit.provider.owner import Gone, Process, Provider

_PATIENCE_S = 10                                      # for the calls that are under way when everybody has left


class Tab:
    """`run` is the token by which the provider knows the calls of this run."""

    def __init__(self, provider: Provider):
        self.run = uuid.uuid4().hex
        self._provider, self._process, self._errands = provider, None, set()

    def serve(self, process: Any, refused: str | None, on_failure: Callable[[LabError], None]) -> None:
        """Tells a worker process where the provider is; or has the provider hear from it that nobody listened, for this effect key."""
        self._errands.add(errand := asyncio.ensure_future(self._serve(process, refused, on_failure)))
        errand.add_done_callback(self._errands.discard)

    async def charges(self, settled: bool = True) -> list[tuple[int, str, str]] | None:
        """Returns the run's charges as (monotonic time in ns, effect key, charge): all of them with `settled`, else those so far.

        None when they are not known: the provider ended meanwhile, or is still at work on a call of the run.
        """
        if self._process is None:
            return []
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self._process.ask("bill", run=self.run, settled=settled)
        except (Gone, TimeoutError):
            return None

    async def _serve(self, process: Any, refused: str | None, on_failure: Callable[[LabError], None]) -> None:
        try:
            if self._process is None:                 # the run keeps to this one: another would not know what it did
                reached: Process = await self._provider.reach()
                self._process = self._process or reached
            if refused is not None:
                await self._process.ask("refused", effect_key=refused)
        except Gone:
            pass                                      # so the calls are refused
        except LabError as error:
            on_failure(error)
            return
        process.tell({"t": "answer", "port": self._process.port, "run": self.run})
