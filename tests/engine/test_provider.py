"""The provider: how it behaves, what a caller meets, what a run counts as its charges, and that its process ends with its lab."""
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import suppress

import psutil
import pytest

from labkit import HandlerError, Lab, Message, PlanError, RetryPolicy, Run, WorkerError, crash, fail
from labkit.provider.behaviour import BEHAVIOURS, Behaviour, Limit
from tests.broker.holder import PATIENCE_S, ROOT, survivors

KEY = "invoice-1:reminder"
AT_ONCE = RetryPolicy(max_attempts=4, delays_ms=(1,), jitter=0)


@pytest.fixture
def provider(lab):
    """The session's lab's provider, which behaves well and has counted nothing."""
    lab.provider.reset()
    yield lab.provider
    lab.provider.reset()


def charge_then_record(delivery, shop):
    shop.provider.charge(delivery.message.effect_key)
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def tell_and_ask_again(delivery, shop):
    """Prints what the call came to, and has the message given back until it is charged."""
    from labkit.retry import classify
    try:
        answer = shop.provider.charge(delivery.message.effect_key, timeout_s=0.3)
    except OSError as error:
        print(type(error).__name__, classify(error), getattr(error, "headers", {}).get("Retry-After"))
        delivery.nack(requeue=True)
    else:
        print("charged", answer["effect_key"])
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()


def post(provider, key="by hand", timeout_s=5.0, body=None):
    """Calls the provider by Python's own means, and returns the status."""
    request = urllib.request.Request(provider.url, json.dumps({"effect_key": key}).encode() if body is None else body)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def post_at_once(provider, number, before=lambda: None):
    """Calls so many times at once, by a thread each; `before` is called when all have begun. Returns the statuses."""
    statuses = []
    callers = [threading.Thread(target=lambda: statuses.append(post(provider, timeout_s=PATIENCE_S))) for _ in range(number)]
    for caller in callers:
        caller.start()
    before()
    for caller in callers:
        caller.join()
    return statuses


def until(condition):
    """Waits for a condition that something else brings about; the suite's own limit of time ends it."""
    while not condition():
        pass


# -- what a caller meets

@pytest.mark.parametrize(("how", "numbers", "met", "status", "charges"), [
    ("down", {}, "ConnectionRefusedError temporary None", "refused", 1), ("busy", {}, "HTTPError temporary 1", 429, 1),
    ("busy", {"retry_after_s": 7}, "HTTPError temporary 7", 429, 1), ("broken", {}, "HTTPError unknown None", 500, 1),
    ("silent", {}, "TimeoutError temporary None", "no answer", 3)])
def test_each_bad_behaviour_is_met_as_what_it_is_and_ends_after_so_many_calls(lab, provider, how, numbers, met, status, charges):
    provider.behave(how, calls=2, **numbers)
    run = lab.run(tell_and_ask_again, lab.reminders(1))
    assert run.facts.printed.splitlines() == [met, met, f"charged {KEY}"]
    assert [call["status"] for call in provider.calls] == [status, status, 200]
    assert {call["effect_key"] for call in provider.calls} == {KEY}
    assert (run.counts["charges"], provider.charges) == (charges, {KEY: charges})


def patient(delivery, shop):
    shop.provider.charge(delivery.message.effect_key, timeout_s=600)


def test_a_slow_provider_that_is_not_waited_for_charges_all_the_same(lab, provider):
    provider.behave("slow", ms=1000, calls=1)
    run = lab.run(tell_and_ask_again, lab.reminders(1))
    assert run.facts.printed.splitlines() == ["TimeoutError temporary None", f"charged {KEY}"]
    assert (run.counts["charges"], run.statuses, run.why) == (2, {KEY: "duplicated"}, f"{KEY} was charged 2 times"), "the late one is waited for"


def test_a_slow_provider_that_is_waited_for_answers(lab, provider):
    provider.behave("slow", ms=50)
    run = lab.run(charge_then_record, lab.reminders(1))
    called, answered = [event.at_ms for event in run.events if event.name == "provider.charge"]
    assert (run.verdict, run.counts["charges"], answered - called >= 50) == ("holds", 1, True)


def test_a_provider_that_is_down_stays_down_and_comes_back_at_the_same_place(provider):
    url = provider.url
    assert post(provider) == 200
    for _ in range(2):
        provider.behave("down")
        with pytest.raises(urllib.error.URLError) as caught:
            post(provider)
        assert isinstance(caught.value.reason, ConnectionRefusedError)
    provider.behave("well")
    assert (post(provider), provider.url) == (200, url)


def test_it_listens_on_the_loopback_interface_only(lab, provider):
    post(provider)
    listening = [connection.laddr.ip for connection in psutil.Process(lab._provider._process.pid).net_connections() if connection.status == psutil.CONN_LISTEN]
    assert listening == ["127.0.0.1"]


def test_the_answer_holds_what_was_sent_and_the_charge(lab, provider):
    def handler(delivery, shop):
        answer = shop.provider.charge(delivery.message.effect_key, amount=20, lines=["a", None])
        print(answer.pop("charge").startswith("charge-"), answer)
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    assert lab.run(handler, lab.reminders(1)).facts.printed == f"True {{'amount': 20, 'lines': ['a', None], 'effect_key': '{KEY}'}}\n"


@pytest.mark.parametrize(("body", "status"), [(b"", 400), (b"[]", 400), (b"\xff", 400), (b'{"effect_key": 5}', 400), (b'{"effect_key": "a"}', 200)])
def test_a_call_that_makes_no_sense_is_answered_so_and_charges_nothing(provider, body, status):
    assert (post(provider, body=body), sum(provider.charges.values())) == (status, int(status == 200))


def test_it_works_on_so_many_calls_at_once_and_has_the_others_wait_in_line(provider):
    provider.behave("well", ms=100, at_once=2)
    assert post_at_once(provider, 5) == [200] * 5
    ends = sorted(call["at_ms"] + call["took_ms"] for call in provider.calls)
    assert all(later - earlier > 99 for earlier, later in zip(ends, ends[2:]))
    by_arrival = [call["at_ms"] + call["took_ms"] for call in sorted(provider.calls, key=lambda call: call["at_ms"])]
    assert by_arrival[0] < by_arrival[2] < by_arrival[4], "whoever came first is served first"


def test_what_came_in_is_told_while_it_is_under_way(provider):
    provider.behave("well", ms=300)

    def look():
        until(lambda: len(provider.calls) == 2)
        if not provider.charges:
            assert [(call["status"], call["took_ms"]) for call in provider.calls] == [("under way", None)] * 2
    assert post_at_once(provider, 2, look) == [200] * 2
    assert all(call["status"] == 200 and call["took_ms"] > 299 for call in provider.calls)


def test_a_limit_takes_so_many_within_any_second_and_what_it_turns_away_does_not_count():
    limit = Limit(2)
    assert [limit.takes(at_ms) for at_ms in (0, 400, 500, 999, 1000, 1399, 1400, 1999, 2000)] == [True, True, False, False, True, False, True, False, True]


def test_more_calls_a_second_than_its_limit_are_answered_429(provider):
    provider.behave("broken", calls=3, limit_per_s=2)
    statuses = post_at_once(provider, 3)
    assert statuses == [500] * 3
    post_at_once(provider, 8)
    calls = provider.calls[3:]
    taken = [call["at_ms"] for call in calls if call["status"] == 200]
    assert all(later - earlier >= 1000 for earlier, later in zip(taken, taken[2:])), "recovered, and with its limit"
    for call in calls:
        assert call["status"] == 200 or sum(0 <= call["at_ms"] - at < 1000 for at in taken) == 2
    assert len(taken) >= 2


def test_it_recovers_into_what_it_was_but_for_the_bad():
    assert Behaviour("slow", ms=300, calls=2, at_once=3).recovered == Behaviour("well", at_once=3)
    assert Behaviour("silent", ms=300, calls=2, limit_per_s=3).recovered == Behaviour("well", ms=300, limit_per_s=3)


@pytest.mark.parametrize(("how", "numbers", "told"), [
    ("wel", {}, "perhaps 'well' is meant"), (5, {}, "no such behaviour"), ("busy", {"retry_after": 1}, "perhaps 'retry_after_s' is meant"),
    ("busy", {"calls": 0}, "calls is 0.*\n.*positive whole"), ("busy", {"calls": 1.5}, "calls is 1.5"), ("down", {"calls": True}, "calls is True"),
    ("well", {"ms": float("inf")}, "ms is inf"), ("well", {"ms": "5"}, "ms is '5'"), ("well", {"calls": 3}, "calls is 3 for a provider that behaves well"),
    ("slow", {}, "how slow"), ("broken", {"retry_after_s": 3}, "only one that is busy"), ("well", {"at_once": -1}, "at_once is -1"), ("well", {"speed": 1}, "a misspelt name")])
def test_a_behaviour_that_there_is_not_is_refused(provider, how, numbers, told):
    with pytest.raises(PlanError, match=told) as caught:
        provider.behave(how, **numbers)
    assert caught.value.now


@pytest.mark.parametrize(("arguments", "told"), [({"timeout_s": 0}, "timeout_s is 0"), ({"amount": {1}}, "no JSON"), ({"timeout_s": "1"}, "timeout_s is '1'")])
def test_a_charge_that_cannot_be_asked_for_is_told(lab, provider, arguments, told):
    def handler(delivery, shop):
        shop.provider.charge(delivery.message.effect_key, **arguments)
    run = lab.run(handler, lab.reminders(1))
    assert told in run.facts.errors[0] and run.facts.errors[0].startswith("HandlerError") and provider.calls == []


# -- what a run counts

def test_a_death_between_charge_and_record_charges_twice(lab, provider):
    sweep = lab.sweep(charge_then_record, lab.reminders(1))
    assert {row.point: (row.status, row.charges, row.effects) for row in sweep.rows} == {
        "no crash": ("once", 1, 1), "before receive": ("once", 1, 1), "after receive": ("once", 1, 1), "before provider.charge": ("once", 1, 1),
        "after provider.charge": ("duplicated", 2, 1), "before ledger.record_once": ("duplicated", 2, 1), "after ledger.record_once": ("duplicated", 2, 1),
        "before ack": ("duplicated", 2, 1), "after ack": ("once", 1, 1)}
    assert sweep.why == f"after provider.charge: {KEY} was charged 2 times (4 of 8 crash points are broken)"
    assert "charges" in repr(sweep) and provider.charges == {KEY: 13}, "each run counts its own"


def test_a_saved_run_keeps_its_charges(lab, provider, tmp_path):
    run = lab.run(charge_then_record, lab.reminders(2), faults=[crash.after("provider.charge", message=2)])
    again = Run.load(run.save(tmp_path / "run"))
    assert run.facts.charges == {KEY: 1, "invoice-2:reminder": 2} == again.facts.charges
    assert (again.verdict, again.why, again.counts, repr(again)) == (run.verdict, run.why, run.counts, repr(run))
    assert run.counts["charges"] == 3 and run.counts["duplicated"] == 1


def test_what_was_recorded_and_charged_too_often_is_told_in_one_sentence(lab, provider):
    def twice(delivery, shop):
        for _ in range(2):
            shop.provider.charge(delivery.message.effect_key)
            shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    run = lab.run(twice, lab.reminders(1))
    assert run.why == f"{KEY} was recorded 2 times and charged 2 times"
    assert [event.name for event in run.evidence] == ["provider.charge", "ledger.record"] * 2


def test_a_charge_without_a_record_is_told_apart_from_a_loss(lab, provider):
    def charge_and_ack(delivery, shop):
        shop.provider.charge(delivery.message.effect_key)
        delivery.ack()
        shop.ledger.record(delivery.message.effect_key)
    run = lab.run(charge_and_ack, lab.reminders(1), faults=[crash.after("ack")])
    assert (run.verdict, run.statuses) == ("broken", {KEY: "lost"})
    assert run.why == f"{KEY} was charged, and its record was lost: no effect in the ledger, and no message of it left"


def test_three_processes_at_once_are_counted_in_their_own_run_and_what_others_call_is_in_none(lab, provider):
    def charge_together(delivery, shop):
        while shop.ledger.execute("SELECT count(DISTINCT worker) FROM deliveries") != [(3,)]:
            pass
        charge_then_record(delivery, shop)
    live = lab.start(charge_together, lab.reminders(30), workers=3)
    other = lab.run(charge_then_record, lab.shipments(5))
    assert post(provider) == 200
    run = live.wait()
    assert (run.verdict, run.counts["charges"], other.verdict, other.counts["charges"]) == ("holds", 30, "holds", 5)
    assert len({event.lane for event in run.events if event.name == "provider.charge"}) == 3
    assert sum(provider.charges.values()) == 36 == len(provider.calls)


def test_a_charge_for_a_key_that_is_none_of_the_runs_is_not_counted_among_them(lab, provider):
    def for_another(delivery, shop):
        shop.provider.charge("invoice-9:reminder")
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    run = lab.run(for_another, lab.reminders(1))
    assert (run.counts["charges"], run.facts.charges, run.verdict) == (0, {"invoice-9:reminder": 1}, "holds")


def test_the_charges_of_a_run_that_is_under_way_are_told(lab, provider):
    provider.behave("silent")
    live = lab.start(patient, lab.reminders(1), deadline_s=600)
    until(lambda: provider.charges)
    assert live.counts["charges"] == 1
    live.stop()
    run = live.wait()
    assert (run.counts["charges"], run.statuses) == (1, {KEY: "pending"})
    assert [event.name for event in run.events if event.lane == "provider"] == ["charged"]


def test_a_reset_in_the_middle_of_a_run_takes_nothing_from_its_count(lab, provider):
    live = lab.start(charge_then_record, lab.reminders(20))
    until(lambda: provider.charges)
    provider.reset()
    assert live.wait().counts["charges"] == 20


def test_a_retry_policy_takes_the_providers_answers_as_they_are_meant(lab, provider):
    provider.behave("down", calls=2)
    run = lab.run(charge_then_record, lab.reminders(1), retry=AT_ONCE)
    assert (run.verdict, run.counts["once"], run.counts["retries"], run.counts["charges"]) == ("holds", 1, 2, 1)
    provider.behave("broken")
    run = lab.run(charge_then_record, lab.reminders(1), retry=AT_ONCE)
    assert (run.verdict, run.statuses, run.counts["retries"], run.counts["charges"]) == ("holds", {KEY: "terminal"}, 0, 0)


def test_a_planned_failure_happens_instead_of_the_call(lab, provider):
    run = lab.run(charge_then_record, lab.reminders(1), faults=[fail("provider.charge", TimeoutError("slow"))], retry=AT_ONCE)
    assert (run.verdict, run.counts["retries"], run.counts["charges"], len(provider.calls)) == ("holds", 1, 1, 1)


def test_a_producer_charges_too(lab, provider):
    def order(shop):
        shop.provider.charge("order-1")
        shop.ledger.record("order-1")
        shop.publish(Message("order-1"))
    run = lab.produce(order)
    assert (run.verdict, run.facts.charges, provider.charges) == ("holds", {"order-1": 1}, {"order-1": 1})
    assert "charges" not in repr(run)


def test_a_race_of_two_that_look_first_charges_twice(lab, provider):
    def look_then_charge(delivery, shop):
        if shop.ledger.find(delivery.message.effect_key) is None:
            shop.provider.charge(delivery.message.effect_key)
            shop.ledger.record_once(delivery.message.effect_key)
        delivery.ack()
    race = lab.race(look_then_charge, lab.reminders(1)[0], limit=20)
    assert race.verdict == "broken" and race.first_broken.run.why == f"{KEY} was charged 2 times"
    assert "B charges" in race.first_broken.told


# -- the trail

def test_a_charge_that_nobody_heard_of_stands_in_the_trail_and_an_answered_one_only_with_its_call(lab, provider):
    provider.behave("silent", calls=1)
    run = lab.run(tell_and_ask_again, lab.reminders(1))
    assert [(row["lane"], row["what"], row["outcome"]) for row in run.trail(KEY).rows if row["what"].startswith(("provider", "charged"))] == [
        ("worker 1", "provider.charge", "reached"), ("provider", "charged", "and nobody heard of it"),
        ("worker 1", "provider.charge", "failed: TimeoutError: timed out"), ("worker 1", "provider.charge", "charged")]


# -- its process

def test_a_run_that_never_calls_it_starts_nothing(broker):
    def record(delivery, shop):
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    with Lab(broker=broker, quiet=True) as lab:
        run = lab.run(record, lab.reminders(1))
        assert (run.facts.charges, "charges" in repr(run), lab.provider.calls, lab.provider.charges) == ({}, False, [], {})
        lab.provider.reset()
        assert lab._provider._process is None


def test_it_ends_with_its_lab(broker):
    lab = Lab(broker=broker, quiet=True)
    provider = lab.provider
    provider.behave("silent")
    process = psutil.Process(lab._provider._process.pid)
    lab.close()
    assert not process.is_running()
    for use in (lambda: lab.provider, lambda: provider.behave("well"), lambda: provider.url):
        with pytest.raises(PlanError, match="This lab is closed"):
            use()


def test_a_frozen_one_ends_with_its_lab(broker, monkeypatch):
    monkeypatch.setattr("labkit.provider.owner._END_S", 0.1)
    lab = Lab(broker=broker, quiet=True)
    lab.provider.behave("well")
    process = psutil.Process(lab._provider._process.pid)
    process.suspend()
    try:
        lab.close()
        assert not process.is_running()
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()


_HOLDS_A_PROVIDER = """
import os, signal
from labkit.provider.owner import Provider
provider = Provider()
provider.behave("silent")
if child := os.fork():
    print(f"{provider._process.pid} {child}", flush=True)
signal.pause()
"""


def test_it_ends_with_a_killed_kernel_even_while_a_child_of_that_holds_its_line():
    holder = subprocess.Popen([sys.executable, "-c", _HOLDS_A_PROVIDER], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                              stdout=subprocess.PIPE)
    family = [psutil.Process(int(pid)) for pid in holder.stdout.readline().split()]
    try:
        process, child = family
        assert os.getsid(process.pid) == process.pid
        holder.kill()
        assert survivors([process]) == [] and child.is_running()
    finally:
        for one in (holder, *family):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        holder.communicate()


def test_an_interrupt_does_not_reach_it(lab, provider):
    provider.behave("well")
    process = psutil.Process(lab._provider._process.pid)
    process.send_signal(signal.SIGINT)
    assert post(provider) == 200 and process.is_running()


def test_one_that_was_killed_makes_its_run_unknown_and_the_next_use_starts_another(broker):
    with Lab(broker=broker, quiet=True) as lab:
        lab.provider.behave("silent")
        live = lab.start(patient, lab.reminders(1))
        until(lambda: lab.provider.charges)
        os.kill(lab._provider._process.pid, signal.SIGKILL)
        run = live.wait()
        assert (run.facts.charges, run.statuses, run.verdict, run.row(KEY)[3]) == (None, {KEY: "unknown"}, "unknown", "?")
        assert "RemoteDisconnected" in run.facts.errors[0] or "ConnectionResetError" in run.facts.errors[0]
        with pytest.raises(TimeoutError):
            post(lab.provider, timeout_s=0.2)         # it behaves as the one before was told to
        lab.provider.behave("well")
        assert lab.run(charge_then_record, lab.reminders(1)).counts["charges"] == 1


def test_one_that_cannot_be_started_is_told(broker, monkeypatch):
    with Lab(broker=broker, quiet=True) as lab:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(WorkerError, match="could not be started"):
            lab.run(charge_then_record, lab.reminders(1))
        monkeypatch.undo()
        assert lab.run(charge_then_record, lab.reminders(1)).verdict == "holds"


def test_a_child_that_a_handler_forks_cannot_call_it_and_is_told(lab, provider):
    def forks(delivery, shop):
        child = os.fork()
        if child == 0:
            try:
                shop.provider.charge(delivery.message.effect_key)
            except Exception as error:
                print(type(error).__name__, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    run = lab.run(forks, lab.reminders(1))
    assert (run.facts.printed, run.verdict, provider.calls) == (f"{HandlerError.__name__}\n", "holds", [])


def test_a_call_leaves_no_open_connection_in_the_worker_however_it_ended(lab, provider):
    def handler(delivery, shop):
        def open_ones():
            return len(os.listdir("/dev/fd"))
        shop.ledger.find(delivery.message.effect_key)
        before, kept = open_ones(), []
        for timeout_s in (0.1, 0.1, 5, 5):
            try:
                shop.provider.charge(delivery.message.effect_key, timeout_s=timeout_s)
            except OSError as error:
                kept.append(error)
        print(open_ones() - before, [type(error).__name__ for error in kept])
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    provider.behave("silent", calls=2)
    run = lab.run(handler, lab.reminders(1))
    assert run.facts.printed == "0 ['TimeoutError', 'TimeoutError']\n"


def test_each_behaviour_is_told_in_the_notes_of_the_method(provider):
    for how in BEHAVIOURS:
        assert f'"{how}"' in type(provider).behave.__doc__


def test_a_cell_that_is_interrupted_leaves_it_usable(lab, provider):
    provider.behave("silent")
    live = lab.start(patient, lab.reminders(1), deadline_s=600)
    until(lambda: provider.charges)
    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        live.wait()
    provider.reset()
    assert (lab.run(charge_then_record, lab.reminders(1)).counts["charges"], provider.charges) == (1, {KEY: 1})
