"""What handlers print, kept up to a bound; and what a looping worker tells about the line it is at."""

import asyncio
import signal

from labkit import origin
from labkit.crew import WorkerProcess

KEPT_BYTES = 20_000
_ANSWER_S = 1


class Prints:
    """Everything that the workers of one run print."""

    def __init__(self):
        self.kept, self.total_bytes = bytearray(), 0
        self._dump: bytearray | None = None
        self._came = asyncio.Event()

    @property
    def text(self) -> str:
        """The first KEPT_BYTES of it."""
        return self.kept.decode(errors="replace")

    def take(self, data: bytes) -> None:
        """Keeps what was printed, or reads it as the answer to `where`."""
        if self._dump is not None:
            self._dump += data
            self._came.set()
        else:
            self.total_bytes += len(data)
            self.kept += data[:max(0, KEPT_BYTES - len(self.kept))]

    async def where(self, process: WorkerProcess, files: dict[str, str]) -> str:
        """Returns the learner's line that a worker is at, in words, or "" when it does not say; faulthandler prints it there. What is printed from then on is not kept."""
        self._dump = bytearray()
        process.signal(signal.SIGUSR1)
        try:
            async with asyncio.timeout(_ANSWER_S):
                while not (told := origin.from_dump(self._dump.decode(errors="replace"), files)):
                    self._came.clear()
                    await self._came.wait()
            return told
        except TimeoutError:
            return ""
