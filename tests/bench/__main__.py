"""The benchmark: labkit beside a bare script that does the same, in one run on one broker; prints ratios, asserts nothing.

    .venv/bin/python -m tests.bench
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from labkit import Lab, crash
from tests import postgres
from tests.bench import publishing, watching
from tests.bench.bare import QUORUM, Bare

ROUNDS, MESSAGES, MANY = 40, 5_000, 50_000


def remind(delivery, shop):
    shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def four_steps(delivery, shop):
    shop.ledger.find("a")
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def remind_once(delivery, shop):
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    with Lab() as lab:
        bare = Bare(lab.broker.address)
        one_kill(lab, bare)
        throughput("SQLite", lab, bare)
        many(lab)
        race(lab)
        publishing.main("SQLite", lab)
        watching.main(lab, remind_once)
        if postgres.programs() or os.environ.get("LABKIT_POSTGRES_URL"):
            with Lab(ledger=postgres.url(), broker=lab.broker, quiet=True) as on_postgres:
                throughput("PostgreSQL", on_postgres, bare)
                race(on_postgres)
                publishing.main("PostgreSQL", on_postgres)
            postgres.pytest_unconfigure()
    imports = statistics.median(float(subprocess.run([sys.executable, "-c", "import time; t = time.perf_counter(); import labkit; print(time.perf_counter() - t)"],
                                                     capture_output=True, text=True, check=True).stdout) for _ in range(5))
    print(f"import labkit: {imports * 1000:.0f} ms")


def one_kill(lab: Lab, bare: Bare) -> None:
    """(1) and (3): rounds in turn, so that all three meet the same machine; medians of ROUNDS."""
    messages, fault = lab.reminders(1), [crash.after("ledger.record")]
    runs, scripts, sweeps = [], [], []
    lab.run(remind, messages, faults=fault)
    for n in range(ROUNDS):
        scripts.append(seconds(lambda: bare.kill_once(lab.queue(f"bench-{n}"))))
        runs.append(seconds(lambda: lab.run(remind, messages, faults=fault)))
        if n % 4 == 0:
            sweeps.append(seconds(lambda: lab.sweep(remind, messages)) / 6)
    script, run, sweep = (statistics.median(times) for times in (scripts, runs, sweeps))
    print(f"(1) one run, one message, one kill: {run * 1000:.1f} ms; bare script {script * 1000:.1f} ms; ratio {run / script:.2f} (at most 0.8)")
    print(f"(3) a sweep, for each crash point: {sweep * 1000:.1f} ms; ratio {sweep / script:.2f} (at most 1.0)")


def throughput(database: str, lab: Lab, bare: Bare) -> None:
    """(2): messages a second while consuming; labkit's from its first to its last event, without publishing."""
    ours, theirs = [], []
    for _ in range(3):
        queue, place = lab.queue("bench-many"), lab._home.new()
        bare.channel.queue_declare(queue, durable=True, arguments=QUORUM)
        bare._publish(queue, MESSAGES)
        theirs.append(MESSAGES / seconds(lambda: bare.consume(queue, MESSAGES, place)))
        bare.channel.queue_delete(queue)
        run = lab.run(remind_once, lab.reminders(MESSAGES), prefetch=100, deadline_s=120)
        assert run.counts["once"] == MESSAGES, run
        work = [event.at_ms for event in run.events if event.name != "published"]
        ours.append(MESSAGES / (max(work) - min(work)) * 1000)
    our, their = statistics.median(ours), statistics.median(theirs)
    print(f"(2) {MESSAGES} messages through record_once on {database}, prefetch 100: {our:.0f}/s; bare loop {their:.0f}/s; ratio {our / their:.2f} (at least 0.8)")


def many(lab: Lab) -> None:
    """A large run: what it costs the kernel in memory, and how long its table and its picture take."""
    took = seconds(lambda: globals().__setitem__("large", lab.run(remind_once, lab.reminders(MANY), prefetch=100, deadline_s=300)))
    table = seconds(lambda: large._repr_html_())                                                        # noqa: F821
    picture = seconds(lambda: large.plot()._repr_html_())                                               # noqa: F821
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1024 ** 2)
    print(f"{MANY} messages: {took:.1f} s; kernel at most {peak:.0f} MB (under 500); table {table:.2f} s, picture {picture:.2f} s (each under 2)")


def race(lab: Lab) -> None:
    """(4): two workers with four steps each, in every order."""
    took = seconds(lambda: globals().__setitem__("raced", lab.race(four_steps, lab.reminders(1)[0])))
    print(f"(4) a race of two times four steps: {raced.tried} of {raced.total} schedules in {took:.1f} s, {took / raced.tried * 1000:.0f} ms each")  # noqa: F821


if __name__ == "__main__":
    main()
