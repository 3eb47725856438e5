"""Retries on the broker: what the policy says is done, nothing is lost on the way, and every road ends."""
import time
import urllib.error
from email.message import Message as Headers

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker

from labkit import BusinessOutcome, HandlerError, LedgerError, Message, PlanError, RetryPolicy, Run, UnknownSchema, crash, fail, hang, publish_outbox
from labkit.topology import connect, wire
from tests.engine.test_live import until

KEY = "invoice-1:reminder"
QUICK = RetryPolicy(max_attempts=3, delays_ms=(30, 60), jitter=0)


def remind(delivery, shop):
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def raising(error, until=99):
    def handler(delivery, shop):
        if delivery.attempt < until:
            raise error
        remind(delivery, shop)
    return handler


def steps_of(run, *names):
    return [(event.name, event.attempt) for event in run.events if event.name in names and event.phase == "after"]


def test_what_is_temporary_comes_again_after_each_delay_and_is_done_at_the_attempt_that_works(either):
    run = either.run(raising(TimeoutError("slow"), until=3), either.reminders(1), retry=QUICK)
    assert (run.verdict, run.statuses[KEY], run.counts["deliveries"], run.counts["retries"], run.counts["records"]) == ("holds", "once", 3, 2, 0)
    assert [event.detail["delay_ms"] for event in run.events if event.name == "retry.publish" and event.phase == "after"] == [30, 60]
    assert run.facts.where == {1: ["acked"] * 3}


@pytest.mark.parametrize(("error", "deliveries", "route", "reason"), [
    (TimeoutError("never answers"), 3, "manual-review", "TimeoutError"), (ValueError("?"), 1, "manual-review", "ValueError"),
    (KeyError("invoice"), 1, "quarantine", "KeyError"), (UnknownSchema("reminder.v9"), 1, "quarantine", "UnknownSchema")])
def test_every_failure_ends_and_the_queue_is_empty(either, error, deliveries, route, reason):
    run = either.run(raising(error), either.reminders(1), retry=QUICK)
    assert (run.verdict, run.statuses[KEY], run.counts["deliveries"], run.counts["retries"], run.facts.ending) == ("holds", "terminal", deliveries, deliveries - 1, "over")
    assert [(record["effect_key"], record["route"], record["reason"], record["attempts"]) for record in run.records] == [(KEY, route, reason, deliveries)]


def test_a_body_that_is_no_json_and_a_schema_that_is_unknown_are_terminal_at_the_first_attempt(lab):
    def only_v1(delivery, shop):
        if delivery.message.schema != "reminder.v1":
            raise UnknownSchema(delivery.message.schema)
        remind(delivery, shop)
    run = lab.run(only_v1, [Message("a", raw="{not JSON"), Message("b", schema="reminder.v2"), Message("c")], retry=QUICK)
    assert (run.verdict, run.statuses, run.deliveries) == ("holds", {"a": "terminal", "b": "terminal", "c": "once"}, {"a": 1, "b": 1, "c": 1})
    assert {record["message_id"]: (record["route"], record["reason"]) for record in run.records} == {
        "message-for-a": ("quarantine", "Unreadable"), "message-for-b": ("quarantine", "UnknownSchema")}


def test_an_answer_of_the_business_is_the_effect_and_an_event_of_the_outbox_and_no_error(either):
    run = either.run(raising(BusinessOutcome("out of stock")), either.shipments(2), retry=QUICK, faults=[crash.before("ack")])
    assert (run.verdict, run.counts["once"], run.facts.errors) == ("holds", 2, [])
    relayed = either.produce(lambda shop: None, relay=publish_outbox, continue_from=run)
    assert [(event.effect_key, event.payload) for event in relayed.published] == [(f"order-{n}:shipment", {"outcome": "out of stock"}) for n in (1, 2)]


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_no_crash_point_of_a_retry_loses_the_message(either, queue_type):
    sweep = either.sweep(raising(TimeoutError("slow"), until=2), either.reminders(1), retry=QUICK, queue_type=queue_type)
    assert (sweep.verdict, sweep.counts["once"], len(sweep.rows)) == ("holds", 12, 13), sweep      # receive, retry.publish and ack; receive, record_once and ack


def test_no_crash_point_on_the_way_to_a_record_loses_the_message_or_makes_two_records(either):
    sweep = either.sweep(raising(ValueError("?")), either.reminders(1), retry=QUICK)
    assert {row.point: (row.run.statuses[KEY], row.run.counts["records"]) for row in sweep.rows} == {row.point: ("terminal", 1) for row in sweep.rows}
    assert (sweep.verdict, len(sweep.rows)) == ("holds", 7)


def test_what_is_with_a_person_is_not_handled_again_though_it_would_work_by_now(lab):
    run = lab.run(raising(ValueError("?"), until=2), lab.reminders(1), retry=QUICK, faults=[crash.before("ack")])
    assert (run.statuses[KEY], run.counts["deliveries"], run.counts["effects"]) == ("terminal", 2, 0)
    assert "parked already" in [event.name for event in run.events]


def test_a_message_is_not_acked_when_its_record_cannot_be_written(either):
    run = either.run(raising(ValueError("?")), either.reminders(1), retry=QUICK, faults=[fail("terminal.record", LedgerError("away"), times=2)])
    assert (run.verdict, run.statuses[KEY], run.counts["records"]) == ("holds", "terminal", 1)
    assert steps_of(run, "ack", "nack", "terminal.record") == [("nack", 1), ("nack", 2), ("terminal.record", 3), ("ack", 3)]


def test_a_message_is_given_back_when_the_broker_does_not_confirm_the_copy(lab):
    def without_its_queue(delivery, shop):
        if delivery.attempt == 3:
            return remind(delivery, shop)
        if delivery.attempt == 2:
            with connect(address) as connection:
                connection.channel().queue_delete(shop._sender._queue.replace("events", "delay-30"))
        delivery.retry("busy")
    address = wire(lab.broker.address)
    run = lab.run(without_its_queue, lab.reminders(1), retry=RetryPolicy(max_attempts=4, delays_ms=(30,), jitter=0))
    assert (run.verdict, run.statuses[KEY], run.counts["retries"]) == ("holds", "once", 1)
    assert steps_of(run, "retry.publish", "nack", "ack") == [("retry.publish", 1), ("ack", 1), ("retry.publish", 2), ("nack", 2), ("ack", 3)]


def test_attempts_reasons_and_delays_travel_along_and_the_age_goes_on(lab):
    def tell(delivery, shop):
        if delivery.attempt < 3:
            delivery.retry(f"try {delivery.attempt}")
        else:
            print(delivery.retries, delivery.age_ms >= 90)
            remind(delivery, shop)
    run = lab.run(tell, lab.reminders(1), retry=QUICK)
    assert run.facts.printed == "[{'attempt': 1, 'reason': 'try 1', 'delay_ms': 30}, {'attempt': 2, 'reason': 'try 2', 'delay_ms': 60}] True\n"


def test_a_message_that_is_too_old_is_not_tried_again(lab):
    run = lab.run(raising(TimeoutError()), lab.reminders(1), retry=RetryPolicy(max_attempts=9, delays_ms=(40,), jitter=0, max_age_ms=100))
    assert (run.statuses[KEY], 1 <= run.counts["deliveries"] < 4) == ("terminal", True)          # by attempts it would be 9


def test_a_service_that_names_a_time_is_not_asked_sooner(lab):
    headers = Headers()
    headers["Retry-After"] = "1"

    def busy(delivery, shop):
        if delivery.attempt == 1:
            raise urllib.error.HTTPError("", 429, "busy", headers, None)
        remind(delivery, shop)
    run = lab.run(busy, lab.reminders(1), retry=QUICK)
    assert (run.statuses[KEY], [event.detail["delay_ms"] for event in run.events if event.name == "retry.publish"]) == ("once", [1000, 1000])


class Refused(Exception):
    pass


def test_errors_of_ones_own_travel_with_the_policy(lab):
    run = lab.run(raising(Refused("card"), until=2), lab.reminders(1), retry=RetryPolicy(delays_ms=(20,), max_attempts=2, kinds={Refused: "temporary"}))
    assert (run.statuses[KEY], run.counts["retries"]) == ("once", 1)
    broken = lab.run(raising(Refused("card")), lab.reminders(1), retry=RetryPolicy(kinds=lambda error: error.kind))
    assert (broken.statuses[KEY], broken.records[0]["reason"], len(broken.facts.errors)) == ("terminal", "Refused", 2)


def test_a_run_that_is_ended_early_knows_what_waits_in_a_delay_queue(lab, tmp_path):
    run = lab.run(raising(TimeoutError()), lab.reminders(2), retry=RetryPolicy(max_attempts=2, delays_ms=(60_000,)), deadline_s=1)
    assert (run.verdict, run.counts["pending"], run.facts.where) == ("unknown", 2, {1: ["acked", "delayed"], 2: ["acked", "delayed"]})
    assert Run.load(run.save(tmp_path / "run")).statuses == run.statuses


def test_several_workers_share_retries_and_nothing_is_lost_when_one_is_killed_by_hand(lab):
    live = lab.start(raising(TimeoutError(), until=2), lab.reminders(60), workers=3, prefetch=5, retry=QUICK)
    live.kill(worker=2)
    run = live.wait()
    assert (run.verdict, run.counts["once"]) == ("holds", 60), run


def test_republishing_by_hand_needs_no_policy_and_two_copies_are_two_deliveries(lab):
    def twice(delivery, shop):
        if delivery.attempt == 1:
            print(delivery.republish(20, "later"))
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    run = lab.run(twice, lab.reminders(1))
    assert (run.facts.printed, run.statuses[KEY], run.counts["deliveries"], run.counts["retries"]) == ("confirmed\n", "duplicated", 2, 1)


@pytest.mark.parametrize(("mistake", "told"), [
    (lambda delivery: delivery.retry("busy"), "no retry policy"), (lambda delivery: delivery.republish(0), "whole number from 1"),
    (lambda delivery: [delivery.republish(20), delivery.republish(20)], "published again already")])
def test_a_mistake_with_a_retry_is_told(lab, mistake, told):
    def handler(delivery, shop):
        if delivery.attempt > 1:
            return remind(delivery, shop)
        try:
            mistake(delivery)
        except HandlerError as error:
            print(error)
        delivery.nack()
    assert told in lab.run(handler, lab.reminders(1)).facts.printed


@pytest.mark.parametrize(("arguments", "told"), [
    ({"retry": 3}, "RetryPolicy is expected"), ({"retry": QUICK, "acknowledge": "auto"}, "forgotten a message"),
    ({"retry": RetryPolicy(max_attempts=30)}, "max_deliveries is the smaller number")])
def test_a_plan_of_retries_that_cannot_be_carried_out_is_refused(lab, arguments, told):
    with pytest.raises(PlanError, match=told):
        lab.run(remind, lab.reminders(1), **arguments)


def test_workers_that_need_the_same_delay_at_once_get_one_queue(lab):
    for _ in range(5):
        run = lab.run(raising(TimeoutError(), until=2), lab.reminders(12), workers=4, retry=QUICK)
        assert (run.counts["once"], run.counts["retries"]) == (12, 12), run


def test_a_run_leaves_no_delay_queue_behind(lab):
    lab.run(raising(TimeoutError()), lab.reminders(1), retry=QUICK)
    deadline = time.monotonic() + 10
    with connect(wire(lab.broker.address)) as connection:
        for delay_ms in QUICK.delays_ms:              # the lab does not wait for the answer to its request to delete
            with pytest.raises(ChannelClosedByBroker, match="NOT_FOUND"):
                channel = connection.channel()
                while time.monotonic() < deadline:
                    channel.queue_declare(f"{lab._prefix}.{lab._runs}.delay-{delay_ms}", passive=True)


def test_a_delay_begins_when_the_copy_is_published_however_long_the_worker_stood_still_before(lab):
    run = lab.run(raising(TimeoutError(), until=2), lab.reminders(1), retry=RetryPolicy(max_attempts=2, delays_ms=(800,), jitter=0),
                  faults=[hang.at("retry.publish", seconds=2.2)])
    assert (run.verdict, run.statuses[KEY], run.facts.where) == ("holds", "once", {1: ["acked", "acked"]})


@pytest.mark.parametrize("reason", ["\ud800", "x" * 100_000, "a\x00b\n", b"\xff", None])
def test_a_reason_of_any_form_travels_along(either, reason):
    def tell(delivery, shop):
        delivery.retry(reason)
    begun = time.monotonic()
    run = either.run(tell, either.reminders(1), retry=RetryPolicy(max_attempts=4, delays_ms=(20,), jitter=0))
    assert (run.verdict, run.statuses[KEY], run.counts["retries"], run.counts["records"], run.facts.errors) == ("holds", "terminal", 3, 1, [])

    def park(delivery, shop):
        delivery.park(reason)
    assert (either.run(park, either.reminders(1)).counts["records"], time.monotonic() - begun < 5) == (1, True)


@pytest.mark.parametrize("odd", [{"required_check": None}, {"route": 3}, {"owner": ["a"]}])
def test_a_record_of_what_is_no_text_is_refused_as_a_mistake(either, odd):
    run = either.run(lambda delivery, shop: delivery.park("?", **odd), either.reminders(1))
    assert (run.statuses[KEY], "HandlerError" in run.facts.errors[0]) == ("terminal", True)          # as a dead letter


def test_a_retry_that_was_not_published_may_be_asked_for_again(lab):
    def stubborn(delivery, shop):
        if delivery.attempt > 1:
            return remind(delivery, shop)
        try:
            delivery.retry("busy")
        except TimeoutError:
            print(delivery.retry("busy"))
    run = lab.run(stubborn, lab.reminders(1), retry=QUICK, faults=[fail("retry.publish", TimeoutError())])
    assert (run.facts.printed, run.statuses[KEY], run.facts.errors) == ("retried\n", "once", [])


def test_a_service_that_names_a_time_beyond_every_delay_is_for_a_person(lab):
    def closed(delivery, shop):
        raise urllib.error.HTTPError("", 503, "closed for the season", {"Retry-After": "9" * 5000}, None)
    run = lab.run(closed, lab.reminders(1), retry=QUICK)
    assert (run.statuses[KEY], run.counts["deliveries"], run.counts["records"]) == ("terminal", 1, 1)


def test_a_number_without_end_does_not_kill_the_worker(lab):
    run = lab.run(remind, [Message("a", raw='{"effect_key": "a", "payload": {"n": ' + "1" * 5000 + "}}"), Message("b")], retry=QUICK)
    assert (run.verdict, run.statuses) == ("holds", {"a": "terminal", "b": "once"})


def test_what_is_with_a_person_is_not_lost_while_the_run_goes_on(lab):
    def handler(delivery, shop):
        if delivery.message.message_id == "reminder-1":
            delivery.park("?")
            print("parked")
        else:
            delivery.retry("busy")
    live = lab.start(handler, lab.reminders(2), retry=RetryPolicy(max_attempts=2, delays_ms=(60_000,)))
    until(lambda: live.counts["retries"])
    counts = live.counts
    live.stop()
    assert (counts["terminal"], counts["lost"], counts["pending"], live.wait().counts["records"]) == (1, 0, 1, 1)


def test_an_error_object_that_is_raised_again_and_again_does_not_grow(lab):
    run = lab.run(raising(TimeoutError(), until=2), lab.reminders(20), retry=QUICK)
    assert [len(event.detail["frames"]) for event in run.events if event.name == "raised"] == [1] * 20


ODD = [{"labkit-position": [1]}, {"labkit-retries": [{"attempt": 2**62, "reason": 5}]}, {"labkit-position": "one", "labkit-published-ms": "x"}]


@pytest.mark.parametrize(("body", "properties"), [
    (b"{", {}), (b"\xff", {"message_id": b"\xff"}), (b'{"effect_key": "f"}', {"message_id": b"\xff", "correlation_id": b"\xff"}),
    (b'{"effect_key": "' + b"k" * 400 + b'"}', {}), *[(b'{"effect_key": "f"}', {"message_id": "f", "headers": headers}) for headers in ODD]])
@pytest.mark.parametrize("stop", [False, True])
def test_a_message_of_somebody_else_is_retried_like_any_other_and_breaks_nothing(lab, tmp_path, body, properties, stop):
    def handler(delivery, shop):
        if delivery.message.message_id == "reminder-1":
            while not go_on.exists():                 # in the worker's process, until the other message is in the queue
                time.sleep(0.005)
            return remind(delivery, shop)
        delivery.retry("busy")
    go_on = tmp_path / "go on"
    live = lab.start(handler, lab.reminders(1), retry=QUICK)
    until(lambda: live.counts["deliveries"])
    with connect(wire(lab.broker.address)) as connection:
        connection.channel().basic_publish("", f"{lab._prefix}.{lab._runs}.work", body, pika.BasicProperties(**properties))
    if stop:
        live.stop()                                   # with both messages in the queue
    else:
        go_on.touch()
    run = live.wait()
    assert (run.statuses[KEY], run.verdict) == (("pending", "unknown") if stop else ("once", "holds"))
    assert Run.load(run.save(tmp_path / "run")).counts == run.counts
