"""The job of a caller: calls a producer once; or a relay again and again, until it has nothing more to publish."""

from typing import Any

_LOOK_S = 0.02                                        # how long a relay waits that found nothing while producers are at work
_TRIES = 2                                            # calls of a relay that raises, before it has nothing more to publish


class Caller:
    """One job of a worker. `go_on` calls until it is to stop, or the connection is lost."""

    left_nothing = True                               # there are no deliveries

    def __init__(self, worker: Any, job: dict[str, Any]):
        self._worker, self._again, self._called = worker, job["again"], False

    def go_on(self) -> None:
        """Calls the producer; a relay again and again, until it is to go on to the end and has nothing more to publish."""
        worker, failed = self._worker, 0
        while not worker.ear.stopping:
            passes, draining = worker.sender.passes, worker.ear.draining      # a look that began earlier may have missed the last event
            if self._again or not self._called:       # else only the connection was lost
                self._called = True
                failed = 0 if self._call() else failed + 1
            if not self._again or draining and worker.sender.passes == passes and not 0 < failed < _TRIES:
                worker.ear.tell(t="idle", handled=0)
                while not worker.ear.stopping:
                    worker.wait()
            else:
                worker.ear.tell(t="passed")           # the supervisor reads the trace, and may end what does not end by itself
                worker.wait(0 if draining else _LOOK_S)

    def _call(self) -> bool:
        """Calls the producer or the relay, and tells whether it returned."""
        worker = self._worker
        worker.shop.outbox.empty_looks = 0
        try:
            worker.enter(worker.shop)
            worker.leave_nothing_open()
            worker.gate.note("returned", None)
        except BaseException as error:
            worker.fail(error)
            return False
        return True
