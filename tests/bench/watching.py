"""What watching costs a run: the same messages with and without `lab.watch`, in turn, on one broker."""

import statistics
import time
from collections.abc import Callable

from labkit import Lab

ROUNDS, FEW, MANY = 21, 300, 3_000


def main(lab: Lab, remind_once: Callable) -> None:
    """(6): from the worker's first step to its last; and the processor time of the kernel, which other work on the machine does not stretch."""
    for words, arguments, messages in (("at prefetch 100", {"prefetch": 100}, MANY), ("one by one", {}, FEW)):
        ratios, spent, samples = [], [], 0
        for n in range(ROUNDS):
            took, kernel = {}, {}
            for watched in ((False, True), (True, False))[n % 2]:
                begun = time.process_time()
                live = lab.start(remind_once, lab.reminders(messages), deadline_s=120, **arguments)
                if watched:
                    samples = len(lab.watch(live).samples)
                run = live.wait()
                kernel[watched] = time.process_time() - begun
                assert run.counts["once"] == messages, run
                work = [event.at_ms for event in run.events if event.name != "published"]
                took[watched] = max(work) - min(work)
            ratios.append(took[True] / took[False])
            spent.append((kernel[True] - kernel[False]) * 1000 / took[False])
        print(f"(6) watched ten times a second, {messages} messages {words}: {samples} samples; {100 * (statistics.median(ratios) - 1):+.1f} % (at most +2); "
              f"processor time of the kernel {100 * statistics.median(spent):+.1f} % of the run")
