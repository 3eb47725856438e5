"""The controller thread: one event loop that owns every connection, worker and run of this kernel.

The notebook's own thread only waits for it, so that an interrupted cell never leaves a connection half used.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any


@cache
def loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop, started the first time that it is asked for."""
    made = asyncio.new_event_loop()
    made.set_exception_handler(_fail_all)
    threading.Thread(target=made.run_forever, name="labkit-controller", daemon=True).start()
    return made


class Work:
    """Something that the controller thread does, while another thread may wait for it."""

    under_way: set["Work"] = set()

    def __init__(self, coroutine: Coroutine):
        self._result: Future = Future()
        self._error: BaseException | None = None
        loop().call_soon_threadsafe(self._start, coroutine)

    def wait(self, grace_s: float = 10) -> Any:
        """Returns the result. An interrupt cancels the work, waits until it has cleaned up, and goes on as the interrupt."""
        try:
            return self._result.result()
        except KeyboardInterrupt:
            self.cancel()
            self.settle(grace_s)
            raise

    def cancel(self) -> None:
        """Has the work clean up and end."""
        loop().call_soon_threadsafe(lambda: self._task.cancel())

    async def over(self, timeout_s: float) -> None:
        """Returns, on the controller thread, when the work is over or the time has passed."""
        await asyncio.wait({self._task}, timeout=timeout_s)

    def settle(self, grace_s: float = 10) -> None:
        """Returns when the work is over, however it ended, or after grace_s."""
        try:
            self._result.exception(grace_s)
        except BaseException:
            pass                                      # cancelled, or too slow

    @property
    def done(self) -> bool:
        """Tells whether the work is over."""
        return self._result.done()

    def fail(self, error: BaseException) -> None:
        """Ends the work, which cleans up, by an error that it could not hear of itself."""
        self._error = self._error or error
        self._task.cancel()

    def _start(self, coroutine: Coroutine) -> None:
        self._task = loop().create_task(coroutine)
        self._task.add_done_callback(self._finish)
        self.under_way.add(self)

    def _finish(self, task: asyncio.Task) -> None:
        self.under_way.discard(self)
        if self._error:
            self._result.set_exception(self._error)
        elif task.cancelled():
            self._result.cancel()
        elif task.exception():
            self._result.set_exception(task.exception())
        else:
            self._result.set_result(task.result())


def _fail_all(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ends all work by the error of a callback: whose it was is not known, and what it should have done would be waited for in vain."""
    if "handle" not in context or not Work.under_way:
        return loop.default_exception_handler(context)
    for work in list(Work.under_way):
        work.fail(context["exception"])


def carry_out(coroutine: Coroutine) -> Any:
    """Does the work on the controller thread and returns its result."""
    return Work(coroutine).wait()
