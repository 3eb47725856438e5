"""A run that is under way: killed by hand, stopped, interrupted; and a kernel that goes away."""
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from labkit import Lab, PlanError, crash, lose
from labkit.amqp import Channel
from labkit.chronicle import Chronicle
from labkit.message import reminders
from tests.engine import handlers


def until(condition, deadline_s=20):
    """Waits until the condition holds, and fails at the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        threading.Event().wait(0.005)


def slowly_once(delivery, shop):
    import time
    time.sleep(0.01)                                  # the work; nothing waits for it
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def test_a_worker_killed_by_hand_is_replaced(lab):
    live = lab.start(slowly_once, lab.reminders(40))
    until(lambda: live.counts["effects"] >= 5)
    live.kill(worker=1)
    run = live.wait()
    assert (run.verdict, run.counts["once"]) == ("holds", 40)
    assert [event.detail for event in run.events if event.name == "killed"] == [{"by": "hand"}]


def test_a_stopped_run_is_unknown_and_says_where_everything_is(lab):
    live = lab.start(slowly_once, lab.reminders(500))
    until(lambda: live.counts["effects"] >= 2)
    live.stop()
    run = live.wait()
    assert run.verdict == "unknown" and "stopped by hand" in run.why
    assert run.counts["once"] + run.counts["pending"] == 500 and run.counts["effects"] >= 2


def test_a_run_that_is_stopped_before_it_has_begun_stops_too(lab):
    live = lab.start(handlers.loop_for_ever, lab.reminders(1), deadline_s=10)
    live.stop()
    assert "stopped by hand" in live.wait().why


def test_what_was_not_published_yet_when_the_run_was_stopped_is_not_lost(lab):
    live = lab.start(handlers.once_then_ack, lab.reminders(100), publish="while", rate=20)
    until(lambda: live.counts["effects"] >= 1)
    assert not live.counts["lost"]
    live.stop()
    run = live.wait()
    assert run.verdict == "unknown" and "stopped by hand" in run.why
    assert (run.counts["lost"], run.counts["once"] + run.counts["pending"]) == (0, 100)


def test_there_is_no_worker_nine(lab):
    live = lab.start(handlers.once_then_ack, lab.reminders(1))
    with pytest.raises(PlanError, match="no worker 9"):
        live.kill(worker=9)
    live.wait()


def test_an_interrupt_stops_the_run_and_leaves_the_lab_usable(lab):
    live = lab.start(handlers.loop_for_ever, lab.reminders(1), deadline_s=600)

    def interrupt():
        until(lambda: live.counts["deliveries"] == 1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        live.wait()
    assert live.done
    assert lab.run(handlers.once_then_ack, lab.reminders(1)).verdict == "holds"


_KERNEL = """
import os, signal, sys
from labkit import Lab
from tests.engine import handlers
lab = Lab(quiet=True)
live = lab.start(handlers.loop_for_ever, lab.reminders(2), workers=2, deadline_s=600)
while live.counts["deliveries"] < 2: pass
print(" ".join(str(seat.process.pid) for seat in live._supervisor._seats), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not pathlib.Path("/proc").exists(), reason="looks into /proc")
def test_killing_the_kernel_leaves_no_worker(lab):
    kernel = subprocess.run([sys.executable, "-c", _KERNEL], capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2])
    assert kernel.returncode == -signal.SIGKILL, kernel.stderr
    workers = [int(pid) for pid in kernel.stdout.split()]
    assert len(workers) == 2
    until(lambda: not any(pathlib.Path(f"/proc/{pid}").exists() for pid in workers))


@pytest.mark.parametrize(("where", "name", "at", "handler", "arguments"), [
    (Chronicle, "_learn", "ledger.record_once", handlers.once_then_ack, {}),
    (Chronicle, "note", "killed", handlers.once_then_ack, {"faults": [crash.after("ack")]}),
    (Chronicle, "note", "ack.dropped", handlers.once_then_ack, {"faults": [lose.ack()]}),
    (Chronicle, "note", "published", handlers.once_then_ack, {}),
    (Chronicle, "note", "dead-lettered", handlers.raise_value_error, {}),
    (Channel, "publish", [(1, reminders(1)[0])], handlers.once_then_ack, {"publish": "while"})])
def test_a_mistake_of_labkits_own_ends_the_run_at_once_and_is_told_as_it_is(lab, monkeypatch, where, name, at, handler, arguments):
    right = getattr(where, name)

    def wrong(*given, **about):
        if at in given:
            raise ZeroDivisionError("a mistake")
        return right(*given, **about)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError, match="a mistake"):
        patch.setattr(where, name, wrong)
        lab.run(handler, lab.reminders(1), deadline_s=30, **arguments)
    assert lab.run(handlers.once_then_ack, lab.reminders(1)).verdict == "holds"


def test_closing_the_lab_ends_its_runs(broker):
    lab = Lab(broker=broker, quiet=True)
    live = lab.start(handlers.loop_for_ever, lab.reminders(1), deadline_s=600)
    until(lambda: live.counts["deliveries"] == 1)
    lab.close()
    assert live.done
    assert live.wait().verdict == "unknown"


def test_a_fork_of_the_kernel_that_ends_closes_nothing(lab):
    first = lab.run(handlers.once_then_ack, lab.reminders(1))
    if not (pid := os.fork()):
        try:
            lab.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert lab.run(handlers.once_then_ack, lab.reminders(2), continue_from=first).verdict == "holds"
