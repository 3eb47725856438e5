"""What a run tells, for handlers that behave and handlers that do not. Real broker, real processes, really killed."""
import threading
import time

import pytest

from labkit import HandlerError, Message, PlanError, crash, fail, hang, lose, supervisor
from tests.engine import handlers

STATUSES = ("once", "duplicated", "lost", "terminal", "pending", "unknown")


def statuses(run):
    return {status: run.counts[status] for status in STATUSES if run.counts[status]}


def test_a_run_without_faults_holds(lab):
    run = lab.run(handlers.effect_then_ack, lab.reminders(5))
    assert (run.verdict, statuses(run)) == ("holds", {"once": 5})
    assert (run.counts["published"], run.counts["deliveries"], run.counts["effects"]) == (5, 5, 5)


def test_a_kill_between_effect_and_ack_makes_a_second_effect(lab):
    run = lab.run(handlers.effect_then_ack, lab.reminders(5), faults=[crash.after("ledger.record", message=3)])
    assert (run.verdict, run.why) == ("broken", "invoice-3:reminder was recorded 2 times")
    assert (run.counts["deliveries"], run.counts["effects"], statuses(run)) == (6, 6, {"once": 4, "duplicated": 1})


def test_the_kill_was_signal_nine_and_is_in_the_trail(lab):
    run = lab.run(handlers.effect_then_ack, lab.reminders(1), faults=[crash.after("ledger.record")])
    killed = [event for event in run.events if event.name == "killed"]
    assert [(event.lane, event.detail["by"]) for event in killed] == [("worker 1", "crash.after('ledger.record')")]
    assert run.facts.fired == [1]


def test_a_kill_between_ack_and_effect_loses_the_task(lab):
    run = lab.run(handlers.ack_then_effect, lab.reminders(2), faults=[crash.after("ack", message=2)])
    assert (run.verdict, statuses(run)) == ("broken", {"once": 1, "lost": 1})


def test_a_fault_that_did_not_fire_proves_nothing(lab):
    run = lab.run(handlers.effect_then_ack, lab.reminders(2), faults=[crash.after("nack")])
    assert (run.verdict, statuses(run)) == ("unknown", {"once": 2})
    assert "crash.after('nack') did not fire" in run.why


def test_a_fault_fires_at_the_attempt_that_it_names(lab):
    faults = [crash.after("ledger.record_once"), crash.before("ack", attempt=2)]
    run = lab.run(handlers.once_then_ack, lab.reminders(1), faults=faults)
    assert (run.verdict, run.counts["deliveries"], run.facts.fired) == ("holds", 3, [1, 1])


def test_a_fault_fires_at_the_nth_passing_of_its_step(lab):
    def two_letters(delivery, shop):
        shop.ledger.record_once("first letter")
        shop.ledger.record_once(delivery.message.effect_key)
        delivery.ack()
    run = lab.run(two_letters, [Message("letter")], faults=[crash.after("ledger.record_once", nth=2)])
    recorded = [event.detail["outcome"] for event in run.events if event.name == "ledger.record_once" and event.phase == "after"]
    assert recorded == ["recorded", "recorded", "duplicate", "duplicate"]


def test_a_lost_ack_left_the_worker_and_never_reached_the_broker(lab):
    run = lab.run(handlers.effect_then_ack, lab.reminders(3), faults=[lose.ack(message=2)])
    assert (run.verdict, run.counts["deliveries"], statuses(run)) == ("broken", 4, {"once": 2, "duplicated": 1})
    sent, = (event for event in run.events if event.name == "ack" and event.phase == "after" and event.detail["outcome"] == "unknown")
    dropped, = (event for event in run.events if event.name == "ack.dropped")
    assert f"basic.ack, channel 1, tag {sent.tag}" in dropped.detail["relay"]
    again = [event.attempt for event in run.events if event.name == "receive" and event.phase == "after" and event.position == 2]
    assert again == [1, 2]


def test_a_worker_that_hangs_for_a_while_goes_on(lab):
    run = lab.run(handlers.effect_then_ack, lab.reminders(2), faults=[hang.at("ack", message=1, seconds=0.05)])
    assert (run.verdict, statuses(run), run.counts["deliveries"]) == ("holds", {"once": 2}, 2)
    assert [event.name for event in run.events if event.name in ("stopped", "continued")] == ["stopped", "continued"]


def test_a_worker_that_hangs_for_good_leaves_the_run_unknown_and_does_not_wait_for_the_deadline(lab):
    run = lab.run(handlers.effect_then_ack, lab.reminders(1), faults=[hang.at("ack")], deadline_s=600)
    assert (run.verdict, statuses(run)) == ("unknown", {"pending": 1})
    assert "hung" in run.why


def test_another_worker_does_not_get_what_a_hung_one_holds(lab):
    run = lab.run(handlers.effect_then_ack, lab.reminders(4), workers=2, faults=[hang.at("ledger.record", message=1)], deadline_s=600)
    assert (statuses(run), run.counts["deliveries"]) == ({"once": 3, "pending": 1}, 4)


def test_a_planned_error_is_raised_in_place_of_the_step(lab):
    run = lab.run(handlers.effect_then_ack, lab.reminders(2), faults=[fail("ledger.record", TimeoutError("the database is slow"))])
    assert (run.counts["effects"], statuses(run)) == (1, {"once": 1, "terminal": 1})
    assert run.facts.errors == ["TimeoutError: the database is slow (in effect_then_ack: `shop.ledger.record(delivery.message.effect_key)`)"]


def test_a_handler_that_raises_is_told_with_its_line_and_its_message_dead_lettered(lab):
    run = lab.run(handlers.raise_value_error, lab.reminders(2))
    assert (run.verdict, statuses(run), run.counts["dead_lettered"]) == ("holds", {"terminal": 2}, 2)
    assert run.facts.errors == ['ValueError: the invoice has no address (in raise_value_error: '
                                '`raise ValueError("the invoice has no address")`) — 2 times']


def test_without_a_dead_letter_queue_a_rejected_message_is_gone(lab):
    run = lab.run(handlers.raise_value_error, lab.reminders(2), dead_letter=False)
    assert (run.verdict, statuses(run)) == ("broken", {"lost": 2})


def test_a_delivery_that_nobody_settles_shows_without_waiting_for_the_deadline(lab):
    run = lab.run(handlers.effect_only, lab.reminders(2), deadline_s=600)
    assert (run.verdict, statuses(run)) == ("broken", {"pending": 2})
    assert "never settled" in run.why and "invoice-1:reminder" in run.why


def test_a_second_ack_breaks_the_channel_and_the_verdict(lab):
    run = lab.run(handlers.ack_twice, lab.reminders(2))
    assert run.verdict == "broken" and "406" in run.why and "unknown delivery tag" in run.why
    assert (run.counts["effects"], statuses(run)) == (2, {"once": 2})


def test_a_handler_that_exits_is_restarted_a_bounded_number_of_times(lab):
    run = lab.run(handlers.exit_with_three, lab.reminders(1))
    assert run.verdict == "broken" and "gave up" in run.why
    assert run.counts["deliveries"] == 6
    assert "SystemExit: 3 (in exit_with_three: `sys.exit(3)`) — 6 times" in run.facts.errors


def test_a_handler_that_loops_is_ended_at_the_deadline_and_told_with_its_line(lab):
    run = lab.run(handlers.loop_for_ever, lab.reminders(1), deadline_s=0.5)
    assert run.verdict == "unknown"
    assert "in loop_for_ever: `" in run.why


def test_a_message_that_comes_back_for_ever_is_stopped(lab):
    run = lab.run(handlers.nack_always, lab.reminders(1), max_deliveries=7)
    assert (run.verdict, run.counts["deliveries"]) == ("broken", 8)
    assert run.why == "invoice-1:reminder was delivered more than 7 times, so the run was stopped"


def test_a_message_that_comes_back_for_ever_is_stopped_although_its_deliveries_are_wiped_from_the_log(lab):
    def wipe_and_nack(delivery, shop):
        shop.ledger.execute("DELETE FROM deliveries")
        delivery.nack(requeue=True)
    run = lab.run(wipe_and_nack, lab.reminders(1), max_deliveries=7)
    assert (run.verdict, run.why) == ("broken", "invoice-1:reminder was delivered more than 7 times, so the run was stopped")


def test_the_brokers_own_limit_dead_letters_the_message(lab):
    def reject_to_the_queue(delivery, shop):
        delivery.reject(requeue=True)
    run = lab.run(reject_to_the_queue, lab.reminders(1), delivery_limit=2)
    assert (run.verdict, run.counts["deliveries"], statuses(run)) == ("holds", 3, {"terminal": 1})


def test_what_a_handler_prints_is_kept_up_to_a_bound(lab):
    def print_a_lot(delivery, shop):
        print("x" * 10_000)
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    run = lab.run(print_a_lot, lab.reminders(10))
    assert (run.verdict, run.facts.printed_bytes, len(run.facts.printed)) == ("holds", 100_010, 20_000)


def test_what_was_printed_before_a_kill_is_kept(lab):
    def say_and_work(delivery, shop):
        print("attempt", delivery.attempt)
        shop.ledger.record_once(delivery.message.effect_key)
        delivery.ack()
    run = lab.run(say_and_work, lab.reminders(1), faults=[crash.before("ack")])
    assert run.facts.printed == "attempt 1\nattempt 2\n"


def test_a_handler_that_cannot_be_shipped_is_refused_with_the_name_of_the_variable(lab):
    lock = threading.Lock()

    def locked(delivery, shop):
        with lock:
            delivery.ack()
    with pytest.raises(HandlerError, match="the variable `lock`"):
        lab.run(locked, lab.reminders(1))


def test_with_automatic_acknowledgement_a_kill_loses_everything_that_was_sent(lab):
    for queue_type in ("quorum", "classic"):
        run = lab.run(handlers.effect_only, lab.reminders(5), acknowledge="auto", queue_type=queue_type, faults=[crash.before("ledger.record", message=2)])
        assert (run.verdict, statuses(run)) == ("broken", {"once": 1, "lost": 4})


def test_a_dead_workers_messages_come_back_although_a_child_of_it_lives_on(lab):
    run = lab.run(handlers.leave_a_child, lab.reminders(1), faults=[crash.after("ledger.record_once")], deadline_s=10)
    assert (run.verdict, run.counts["deliveries"]) == ("holds", 2)


def test_several_workers_share_the_messages(lab):
    run = lab.run(handlers.once_then_ack, lab.reminders(40), workers=3, prefetch=5)
    assert (run.verdict, statuses(run)) == ("holds", {"once": 40})


def test_each_worker_leaves_at_once_when_the_run_is_over(lab, monkeypatch):
    monkeypatch.setattr(supervisor, "_FAREWELL_S", 600)                        # a worker that did not hear of it would be waited for
    for _ in range(25):
        live = lab.start(handlers.raise_value_error, lab.reminders(5), workers=3, dead_letter=False, faults=[crash.after("reject", attempt=2)])
        end = time.monotonic() + 5
        while not live.done:
            assert time.monotonic() < end, "a worker did not leave"
            threading.Event().wait(0.002)


def test_the_attempt_counts_although_the_first_worker_died(lab):
    run = lab.run(handlers.once_then_ack, lab.reminders(1), faults=[crash.after("receive"), crash.after("receive", attempt=2)])
    attempts = [event.attempt for event in run.events if event.name == "receive" and event.phase == "after"]
    assert attempts == [1, 2, 3]


def test_a_run_goes_on_with_the_ledger_of_an_earlier_one(lab):
    first = lab.run(handlers.once_then_ack, lab.reminders(2))
    second = lab.run(handlers.once_then_ack, lab.reminders(3), continue_from=first)
    outcomes = [event.detail["outcome"] for event in second.events if event.name == "ledger.record_once" and event.phase == "after"]
    assert outcomes == ["duplicate", "duplicate", "recorded"]
    assert (second.verdict, statuses(second)) == ("holds", {"once": 3})


def test_a_stray_effect_breaks_the_promise(lab):
    def wrong_key(delivery, shop):
        shop.ledger.record(delivery.message.effect_key)
        shop.ledger.record("invoice-99:reminder")
        delivery.ack()
    run = lab.run(wrong_key, lab.reminders(1))
    assert (run.verdict, run.counts["stray"]) == ("broken", 1)
    assert "invoice-99:reminder, which nobody published" in run.why


def test_effects_of_an_earlier_run_are_no_strays_and_new_ones_are(lab):
    first = lab.run(handlers.once_then_ack, lab.reminders(2))
    second = lab.run(handlers.once_then_ack, lab.reminders(3)[2:], continue_from=first)
    assert (second.verdict, second.counts["stray"], second.facts.effects) == ("holds", 0, {f"invoice-{n}:reminder": 1 for n in (1, 2, 3)})

    def write_for_the_first_too(delivery, shop):
        shop.ledger.record("invoice-1:reminder")
        handlers.once_then_ack(delivery, shop)
    third = lab.run(write_for_the_first_too, lab.reminders(3)[2:], continue_from=first)
    assert (third.verdict, third.strays) == ("broken", {"invoice-1:reminder": 1})
    assert "an effect was recorded for invoice-1:reminder, which nobody published" in third.why


def test_messages_may_be_published_while_the_workers_run(lab):
    run = lab.run(handlers.once_then_ack, lab.reminders(10), publish="while", rate=500)
    assert (run.verdict, statuses(run)) == ("holds", {"once": 10})


def test_a_worker_that_says_nothing_because_it_is_busy_is_left_alone(lab):
    def takes_long_over_the_second(delivery, shop):
        import time
        end = time.monotonic() + (0.5 if delivery.position == 2 else 0)
        while time.monotonic() < end:
            pass
        handlers.once_then_ack(delivery, shop)
    runs = [lab.run(takes_long_over_the_second, lab.reminders(3)) for _ in range(2)]
    assert [[event.name for event in run.events].count("started") for run in runs] == [1, 1]


def test_no_messages_is_a_run_too(lab):
    run = lab.run(handlers.once_then_ack, [])
    assert (run.verdict, run.counts["keys"]) == ("holds", 0)


@pytest.mark.parametrize("publish", ["first", "while"])
def test_the_queues_are_there_before_a_worker_looks_for_them(lab, publish):
    runs = [lab.run(handlers.once_then_ack, [], publish=publish) for _ in range(20)]
    assert not [event for run in runs for event in run.events if event.name == "channel.closed"]


def test_the_same_run_gives_the_same_trail(lab):
    def told(run):
        return [(e.lane, e.name, e.phase, e.position, e.attempt, e.tag, e.detail) for e in run.events]
    runs = [lab.run(handlers.effect_then_ack, lab.reminders(4), faults=[crash.after("ledger.record", message=2)]) for _ in range(5)]
    for run in runs[1:]:
        assert told(run) == told(runs[0])


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"acknowledge": "maybe"}, {"queue_type": "stream"}, {"publish": "never"},
                                       {"prefetch": 70_000}, {"dead_letter": "no"}, {"delivery_limit": "2"}, {"delivery_limit": -1},
                                       {"delivery_limit": 2, "queue_type": "classic"}, {"faults": crash.after("ack")}, {"continue_from": 3},
                                       {"rate": 5}, {"faults": [fail("ack", ValueError(threading.Lock()))]}, {"deadline_s": float("nan")}, {"deadline_s": -1}, {"faults": ["crash"]}, {"faults": [crash.after("ack", message=9)]}])
def test_a_plan_that_cannot_be_carried_out_is_refused(lab, arguments):
    with pytest.raises(PlanError):
        lab.run(handlers.once_then_ack, lab.reminders(2), **arguments)


@pytest.mark.parametrize("verb", ["run", "start"])
def test_an_argument_that_is_not_known_is_refused_with_the_likely_one_and_all_of_them(lab, verb):
    with pytest.raises(PlanError, match=f"lab.{verb} has no argument 'worker'.\nLikely cause: perhaps 'workers' is meant\nWhat now: .*faults, workers, prefetch"):
        getattr(lab, verb)(handlers.once_then_ack, lab.reminders(1), worker=2)


@pytest.mark.parametrize("messages", [None, 5, Message("one"), ["one"]])
def test_what_is_no_list_of_messages_is_refused(lab, messages):
    with pytest.raises(PlanError, match="messages"):
        lab.run(handlers.once_then_ack, messages)


def test_an_error_that_would_not_arrive_as_itself_is_refused(lab):
    class TwoWords(Exception):
        def __init__(self, one, two):
            super().__init__(one)
    with pytest.raises(PlanError, match="TwoWords: one cannot be sent"):
        lab.run(handlers.once_then_ack, lab.reminders(1), faults=[fail("ack", TwoWords("one", "two"))])


@pytest.mark.parametrize("plan", [lambda: crash.after("ack", message=1.5), lambda: crash.after("ack", nth="2"), lambda: hang.at("ack", seconds=-1)])
def test_a_fault_that_could_never_fire_is_refused(plan):
    with pytest.raises(PlanError):
        plan()


def test_a_misspelt_step_is_refused_with_the_likely_one():
    with pytest.raises(PlanError, match="'ledger.record'"):
        crash.after("ledger.recrod")
