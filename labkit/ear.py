"""The worker's end of its private line: a thread hears the supervisor, because the other one may be inside pika, or inside the handler.

If the line ends, the supervisor is gone, and so is the worker.
"""

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from labkit import link


class Ear:
    """`jobs` and `answers` hold (frame, blob) pairs; `stopping`, `draining` and `may_stay` are what the supervisor said last."""

    def __init__(self, line: socket.socket, wake: Callable[[], None]):
        """wake() is called from the thread when there is something to look at."""
        self._line, self._wake, self._decoder = line, wake, link.Decoder()
        self.fileno = line.fileno
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        self.stopping = self.draining = self.may_stay = False

    def begin(self) -> dict[str, Any] | None:
        """Waits for the first frame, the broker's address, and listens from then on; returns None when there was none."""
        (hello, _), *rest = link.receive(self._line, self._decoder) or [(None, b"")]
        if hello is not None:
            threading.Thread(target=self._listen, args=(rest,), daemon=True).start()
        return hello

    def tell(self, **frame: Any) -> None:
        """Says something to the supervisor."""
        try:
            self._line.sendall(link.encode(frame))
        except OSError:
            os._exit(1)                               # the supervisor is gone

    def _listen(self, frames: list) -> None:
        while True:
            for frame, blob in frames:
                match frame["t"]:
                    case "answer":
                        self.answers.put((frame, blob))
                        continue
                    case "job":
                        self.stopping, self.draining = False, frame["draining"]        # here, so that a stop right behind the job is not forgotten
                        self.jobs.put((frame, blob))
                    case "drain":
                        self.draining = True
                    case "stop":
                        self.may_stay, self.stopping = frame["may_stay"], True
                self._wake()
            if not (frames := link.receive(self._line, self._decoder)):
                os.kill(0, signal.SIGKILL)            # the whole group, with whatever the handler started
