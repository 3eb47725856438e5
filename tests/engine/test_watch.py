"""Watching a run under way: what is told of it, on which thread, and what becomes of the watching when the run, the broker or the cell ends."""
import threading

import pytest

from labkit import BrokerError, PlanError, RetryPolicy, crash
from tests.engine import handlers
from tests.engine.test_live import slowly_once, until

QUICK_MS = 10


def fields(watch, *names):
    return [tuple(getattr(sample, name) for name in names) for sample in watch.samples]


def test_a_run_is_watched_to_its_end_and_the_totals_add_up(lab):
    live = lab.start(slowly_once, lab.reminders(40), publish="while", rate=400)
    watch = lab.watch(live, every_ms=QUICK_MS)
    run = live.wait()
    assert watch.over and watch.name == "slowly_once" and run.verdict == "holds"
    totals = fields(watch, "at_ms", "arrivals", "services", "deliveries")
    assert totals == sorted(totals) and totals[-1][1:] == (40, 40, 40)
    assert fields(watch, "ready", "waiting", "in_flight", "oldest_ms")[-1] == (0, 0, 0, 0)
    assert all(sample.waiting + sample.in_flight == sample.arrivals - sample.services for sample in watch.samples)
    assert all(sample.in_flight <= 1 for sample in watch.samples)
    assert watch.samples[0].at_ms >= watch.began_ms == min(event.at_ms for event in run.events if event.name == "published")


def test_what_waits_is_told_by_the_broker_and_grows_older(lab):
    live = lab.start(handlers.loop_for_ever, lab.reminders(30), deadline_s=60)
    until(lambda: live.counts["deliveries"] == 1)
    watch = lab.watch(live, every_ms=QUICK_MS, for_s=0.1)
    live.stop()
    assert not watch.over and {(29, 1)} == set(fields(watch, "ready", "in_flight")[-1:])
    ages = [sample.oldest_ms for sample in watch.samples]
    assert ages == sorted(ages) and ages[-1] - ages[0] == pytest.approx(watch.samples[-1].at_ms - watch.samples[0].at_ms)
    assert live.wait().verdict == "unknown"


def test_each_sample_is_told_on_the_thread_that_watches_and_an_error_there_ends_the_watching_only(lab):
    live, threads = lab.start(slowly_once, lab.reminders(50)), []

    def look(watch):
        threads.append(threading.current_thread())
        if len(watch.samples) >= 3:
            raise ValueError("enough")
    with pytest.raises(ValueError, match="enough"):
        lab.watch(live, every_ms=QUICK_MS, on_sample=look)
    assert set(threads) == {threading.current_thread()}
    assert live.wait().counts["once"] == 50


def test_who_is_slow_to_look_misses_samples_between_and_never_the_last(lab):
    live, seen = lab.start(slowly_once, lab.reminders(30)), []

    def look(watch):
        seen.append(watch.over)
        until(lambda: live.done)
    watch = lab.watch(live, every_ms=QUICK_MS, on_sample=look)
    assert seen[-1] and not any(seen[:-1]) and len(seen) <= 2 < len(watch.samples)


def test_the_last_look_at_a_run_that_goes_on_is_told_too(lab):
    live, seen = lab.start(handlers.loop_for_ever, lab.reminders(3), deadline_s=60), []
    watch = lab.watch(live, every_ms=QUICK_MS, for_s=0.1, on_sample=lambda watch: seen.append(watch.samples[-1]))
    live.stop()
    assert not watch.over and seen[-1] is watch.samples[-1]


def test_a_run_that_is_over_is_seen_once(lab):
    live = lab.start(handlers.once_then_ack, lab.reminders(3))
    live.wait()
    watch = lab.watch(live)
    assert watch.over and fields(watch, "ready", "arrivals", "services") == [(0, 3, 3)]


def test_a_killed_worker_is_marked_and_its_message_is_not_in_flight_twice(lab):
    live = lab.start(slowly_once, lab.reminders(20), faults=[crash.before("ack", message=5)])
    watch = lab.watch(live, every_ms=QUICK_MS)
    run = live.wait()
    assert [name for _, name in watch.faults] == ["killed"] and watch.faults[0][0] == next(event.at_ms for event in run.events if event.name == "killed")
    assert fields(watch, "services", "deliveries")[-1] == (20, 21)


def test_a_watched_run_is_not_taken_for_a_stalled_one(lab):
    def two_steps(delivery, shop):
        import time
        shop.ledger.find("a")
        time.sleep(0.4)                               # longer than idle workers are waited for; nothing in the test waits for it
        shop.ledger.record_once(delivery.message.effect_key)
        delivery.ack()
    live = lab.start(two_steps, lab.reminders(3))
    watch = lab.watch(live, every_ms=1)
    run = live.wait()
    assert (run.verdict, run.counts["deliveries"], watch.samples[-1].services) == ("holds", 3, 3)


def test_watching_leaves_the_channels_as_they_were(lab):
    def once():
        live = lab.start(slowly_once, lab.reminders(5))
        lab.watch(live, every_ms=QUICK_MS)
        live.wait()
    once()
    free = len(lab._session._free)
    for _ in range(3):
        once()
    assert len(lab._session._free) == free


def test_what_cannot_be_watched_is_refused(lab):
    run = lab.run(handlers.once_then_ack, lab.reminders(1))
    with pytest.raises(PlanError, match="nothing to watch in a Run"):
        lab.watch(run)
    live = lab.start(handlers.once_then_ack, lab.reminders(1))
    for wrong in ({"every_ms": 0}, {"for_s": -1}):
        with pytest.raises(PlanError, match="must be a positive number"):
            lab.watch(live, **wrong)
    live.wait()


def test_a_broker_that_freezes_is_seen_without_its_word_and_the_watching_ends_with_the_run(own, own_lab):
    live = own_lab.start(handlers.once_then_ack, own_lab.reminders(10_000), publish="while", rate=500, deadline_s=4)
    until(lambda: live.counts["effects"] >= 5)
    own.freeze()
    try:
        watch = own_lab.watch(live, every_ms=QUICK_MS)
        run = live.wait()
    finally:
        own.thaw()
    assert watch.over and run.verdict == "unknown"
    assert None in [sample.ready for sample in watch.samples[:-1]]
    assert own_lab.run(handlers.once_then_ack, own_lab.reminders(5)).verdict == "holds"


def test_a_broker_that_goes_away_ends_the_watching_and_raises_nothing(own, own_lab):
    live = own_lab.start(handlers.once_then_ack, own_lab.reminders(10_000), publish="while", rate=500)
    until(lambda: live.counts["effects"] >= 5)
    own.kill()
    try:
        watch = own_lab.watch(live, every_ms=QUICK_MS)
        assert watch.over and "the connection to the broker ended" in live.wait().why
        began_badly = own_lab.start(handlers.once_then_ack, own_lab.reminders(1))
        assert "nothing was seen" in repr(own_lab.watch(began_badly))
        with pytest.raises(BrokerError):
            began_badly.wait()
    finally:
        own.start()
    assert own_lab.run(handlers.once_then_ack, own_lab.reminders(5)).verdict == "holds"


def test_a_watch_is_told_in_a_few_lines_as_text_and_as_html(lab):
    live = lab.start(slowly_once, lab.reminders(10))
    watch = lab.watch(live, every_ms=QUICK_MS, name="ten <letters>")
    live.wait()
    lines = repr(watch).splitlines()
    assert lines[0].startswith("ten <letters>: ") and lines[0].endswith("until the run was over")
    assert [line.split("  ")[0] for line in lines[3:]] == ["ready", "in flight", "oldest, ms", "arrivals a second", "services a second"]
    assert "ten &lt;letters&gt;" in watch._repr_html_() and "<table>" in watch._repr_html_()


def test_the_measures_of_a_run_show_what_its_mean_hides(lab):
    def handler(delivery, shop):
        if delivery.message.effect_key == "invoice-1:reminder":
            delivery.nack(requeue=delivery.attempt < 10)
        else:
            handlers.once_then_ack(delivery, shop)
    run = lab.run(handler, lab.reminders(4))
    ages = {event.position: event.at_ms for event in run.events if event.name == "published"}
    ended = max(event.at_ms - ages[event.position] for event in run.events if (event.name, event.phase) in {("ack", "after"), ("dead-lettered", "note")})
    measures = run.measures
    assert measures.terminal_share == 1 / 4 and measures.retries == run.counts["retries"]
    assert measures.oldest_ms == ended > measures.mean_handling_ms > 0
    assert repr(measures).endswith("25% terminal")


def test_a_message_that_waits_for_its_retry_waits_once(lab):
    def at_the_second_try(delivery, shop):
        if delivery.attempt == 1:
            delivery.retry("not yet")
        else:
            handlers.once_then_ack(delivery, shop)
    live = lab.start(at_the_second_try, lab.reminders(5), retry=RetryPolicy(max_attempts=3, delays_ms=(50, 50)))
    watch = lab.watch(live, every_ms=2)
    run = live.wait()
    assert run.counts["retries"] == run.measures.retries == 5
    assert fields(watch, "arrivals", "services", "deliveries", "waiting", "in_flight")[-1] == (5, 5, 10, 0, 0)
    assert all(0 <= sample.services <= sample.arrivals == 5 for sample in watch.samples) and 5 in [sample.waiting for sample in watch.samples]


def test_of_a_run_without_messages_nothing_is_seen(lab):
    live = lab.start(handlers.once_then_ack, [])
    assert lab.watch(live).samples == [] and live.wait().counts["published"] == 0
