"""What watching costs a run: the same messages with and without `lab.watch`, in turn, on one broker."""

import statistics
from collections.abc import Callable

from labkit import Lab

ROUNDS, FEW, MANY = 15, 500, 4_000


def main(lab: Lab, remind_once: Callable) -> None:
    """(6): how long the work took, from the first message confirmed to the last one settled."""
    for words, arguments, messages, every_ms in (("as fast as it can", {"prefetch": 100, "deadline_s": 120}, MANY, 100),
                                                 ("one by one", {"deadline_s": 120}, FEW, 100)):
        ratios = []
        for n in range(ROUNDS):
            took = {}
            for watched in ((False, True), (True, False))[n % 2]:
                live = lab.start(remind_once, lab.reminders(messages), **arguments)
                if watched:
                    watch = lab.watch(live, every_ms=every_ms)
                run = live.wait()
                assert run.counts["once"] == messages, run
                work = [event.at_ms for event in run.events if event.name != "published"]
                took[watched] = max(work) - min(work)
            ratios.append(took[True] / took[False])
        print(f"(6) watched every {every_ms} ms, {messages} messages {words}: {len(watch.samples)} samples; "
              f"median of {ROUNDS} rounds in turn {100 * (statistics.median(ratios) - 1):+.1f} % (at most +2)")
