"""R: what is tried again and what is not, what it costs, and where every failure ends."""
import http.client
import json
import urllib.error
from collections import Counter
from statistics import quantiles

import pytest

from labkit import BrokenRule, BusinessOutcome, Message, RetryPolicy, UnknownSchema, classify, crash, publish_outbox
from labkit.plots import tallest_wave

KEY = "invoice-1:reminder"
QUICK = RetryPolicy(max_attempts=3, delays_ms=(20, 40), jitter=0)


def remind(delivery, shop):
    shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def remind_once(delivery, shop):
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def failing(error):
    def handler(delivery, shop):
        raise error
    return handler


def http_error(status):
    return urllib.error.HTTPError("", status, "", http.client.HTTPMessage(), None)


@pytest.mark.claim("R1")
def test_a_failure_is_classified_before_anything_is_tried_again_and_unknown_is_not_temporary(lab):
    kinds = {"temporary": [ConnectionResetError(), TimeoutError(), http_error(429), http_error(503)],
             "terminal": [json.JSONDecodeError("", "", 0), UnknownSchema("reminder.v9"), KeyError("invoice"), BrokenRule("no credit"), http_error(404)],
             "business": [BusinessOutcome("out of stock")], "unknown": [ValueError("?"), RuntimeError("?"), http_error(500)]}
    for kind, errors in kinds.items():
        assert {classify(error) for error in errors} == {kind}
    attempts = {type(error).__name__: lab.run(failing(error), lab.reminders(1), retry=QUICK).counts["deliveries"]
                for error in (TimeoutError(), KeyError("invoice"), RuntimeError("?"), BusinessOutcome("out of stock"))}
    assert attempts == {"TimeoutError": 3, "KeyError": 1, "RuntimeError": 1, "BusinessOutcome": 1}


@pytest.mark.claim("R1")
def test_an_answer_of_the_business_is_an_event_and_no_error(either):
    run = either.run(failing(BusinessOutcome("out of stock")), either.shipments(1), retry=QUICK, faults=[crash.before("ack")])
    events = either.produce(lambda shop: None, relay=publish_outbox, continue_from=run).published
    assert (run.statuses, run.facts.errors, [event.payload["outcome"] for event in events]) == ({"order-1:shipment": "once"}, [], ["out of stock"])


@pytest.mark.claim("R2")
def test_two_questions_come_first_can_it_be_read_and_is_it_done_already(either):
    def service_is_down(delivery, shop):
        if shop.ledger.find(delivery.message.effect_key):
            return delivery.ack()
        raise ConnectionRefusedError
    done = either.run(remind_once, [Message("a")])
    run = either.run(service_is_down, [Message("a"), Message("b", raw="{not JSON"), Message("c")], retry=QUICK, continue_from=done)
    assert (run.statuses, run.deliveries) == ({"a": "once", "b": "terminal", "c": "terminal"}, {"a": 1, "b": 1, "c": 3})


@pytest.mark.claim("R3")
def test_a_permanent_error_without_a_limit_makes_a_hot_loop_that_starves_useful_work(lab):
    def at_once(delivery, shop):
        if delivery.message.effect_key == KEY:
            return delivery.nack(requeue=True)
        remind(delivery, shop)
    run = lab.run(at_once, lab.reminders(6), max_deliveries=300, delivery_limit=900)
    assert (run.verdict, run.facts.ending, run.deliveries[KEY], run.counts["once"]) == ("broken", "max_deliveries", 301, 0)
    policy = lab.run(failing_first(ValueError("poison")), lab.reminders(6), retry=QUICK)
    assert (policy.verdict, policy.deliveries[KEY], policy.counts["once"], policy.counts["terminal"]) == ("holds", 1, 5, 1)


def failing_first(error):
    def handler(delivery, shop):
        if delivery.message.effect_key == KEY:
            raise error
        remind(delivery, shop)
    return handler


@pytest.mark.claim("R5")
def test_the_broker_keeps_the_delay_never_too_short_and_hardly_too_long_while_the_worker_does_other_work(lab):
    def once_more(delivery, shop):
        if delivery.attempt == 1:
            raise TimeoutError
        remind(delivery, shop)
    late = []
    for _ in range(5):                                # a busy machine may be late once
        run = lab.run(once_more, lab.reminders(40), prefetch=5, retry=RetryPolicy(max_attempts=2, delays_ms=(300,), jitter=0))
        left = {event.position: event for event in run.events if event.name == "retry.publish" and event.phase == "before"}
        back = [event for event in run.events if event.name == "receive" and event.phase == "before" and event.detail.get("copy")]
        waited = [event.at_ms - left[event.position].at_ms for event in back]
        assert (run.counts["once"], len(waited)) == (40, 40) and min(waited) >= 300
        late.append(quantiles(waited, n=20)[-1] - 300)
        if late[-1] <= 60:
            break
    assert min(late) <= 60, late                      # 20 %


@pytest.mark.claim("R7")
@pytest.mark.parametrize(("policy", "attempts", "delays"), [
    (RetryPolicy(max_attempts=1, delays_ms=()), 1, []), (RetryPolicy(max_attempts=2, delays_ms=(20,), jitter=0), 2, [20]), (QUICK, 3, [20, 40]),
    (RetryPolicy(max_attempts=9, delays_ms=(60,), jitter=0, max_age_ms=50), 1, [])])
def test_a_budget_counts_the_first_attempt_and_waits_one_time_less(lab, policy, attempts, delays):
    run = lab.run(failing(TimeoutError()), lab.reminders(1), retry=policy)
    assert (run.counts["deliveries"], [event.detail["delay_ms"] for event in run.events if event.name == "retry.publish" and event.phase == "after"]) == (attempts, delays)
    assert run.records[0]["route"] == "manual-review"


def publish_then_ack(delivery, shop):
    if delivery.attempt > 1:
        return remind(delivery, shop)
    delivery.republish(20)
    delivery.ack()


def ack_then_publish(delivery, shop):
    if delivery.attempt > 1:
        return remind(delivery, shop)
    delivery.ack()
    delivery.republish(20)


def publish_then_ack_with_a_key(delivery, shop):
    if delivery.attempt > 1:
        return remind_once(delivery, shop)
    delivery.republish(20)
    delivery.ack()


@pytest.mark.claim("R8")
def test_a_retry_is_two_steps_and_a_crash_between_them_doubles_the_message_or_loses_it(either):
    first, last, mended = (either.sweep(handler, either.reminders(1)) for handler in (publish_then_ack, ack_then_publish, publish_then_ack_with_a_key))
    again = dict.fromkeys(["after ledger.record of attempt 2", "before ack of attempt 2"], "duplicated")       # as any effect before its ack
    assert {row.point: row.status for row in first.rows if row.verdict != "holds"} == {
        "after retry.publish": "duplicated", "before ack": "duplicated", **again}
    assert {row.point: row.status for row in last.rows if row.verdict != "holds"} == {
        "after ack": "lost", "before retry.publish": "lost", **again}
    assert (mended.verdict, mended.counts["once"]) == ("holds", 12)


@pytest.mark.claim("R9")
def test_a_higher_limit_and_longer_delays_only_repeat_the_wrong_step(lab):
    def once_they_are_temporary(attempts):
        policy = RetryPolicy(max_attempts=attempts, delays_ms=(10, 20, 30)[:attempts - 1], jitter=0, kinds={KeyError: "temporary"})
        return lab.run(failing(KeyError("invoice")), lab.reminders(2), retry=policy)
    runs = [once_they_are_temporary(attempts) for attempts in (2, 4, 8)]
    assert [(run.counts["deliveries"], run.counts["terminal"], run.counts["effects"]) for run in runs] == [(4, 2, 0), (8, 2, 0), (16, 2, 0)]
    assert {record["reason"] for run in runs for record in run.records} == {"KeyError"}


@pytest.mark.claim("R12")
@pytest.mark.parametrize("error", [TimeoutError("no answer"), http_error, ConnectionRefusedError("down")])
def test_the_negative_path_ends(either, error):
    def never(delivery, shop):
        raise error(503) if callable(error) else error
    run = either.run(never, either.reminders(5), workers=2, retry=QUICK)
    assert (run.verdict, run.facts.ending, run.counts["deliveries"], run.counts["retries"], run.counts["terminal"]) == ("holds", "over", 15, 10, 5)
    assert Counter(record["route"] for record in run.records) == {"manual-review": 5}
    assert {place for places in run.facts.where.values() for place in places} == {"acked"}


@pytest.mark.claim("R13")
def test_the_numbers_of_a_policy_bound_the_time_that_a_message_is_under_way(lab):
    policy = RetryPolicy(max_attempts=3, delays_ms=(100, 200), jitter=0.2)
    assert [policy.longest_ms(attempt_ms) for attempt_ms in (0, 1000)] == [360, 3360]
    run = lab.run(failing(TimeoutError()), lab.reminders(1), retry=policy)
    delays = [event.detail["delay_ms"] for event in run.events if event.name == "retry.publish" and event.phase == "after"]
    assert sum(delays) <= policy.longest_ms(0)


@pytest.mark.claim("R14")
def test_two_versions_of_a_schema_live_side_by_side_and_neither_stops_the_other(either):
    def knows_v1(delivery, shop):
        if delivery.message.schema != "reminder.v1":
            raise UnknownSchema(delivery.message.schema)
        remind(delivery, shop)
    mixed = [Message(f"invoice-{n}:reminder", schema=f"reminder.v{1 + n % 2}") for n in range(1, 7)]
    run = either.run(knows_v1, mixed, retry=QUICK)
    assert (run.verdict, run.counts["once"], run.counts["terminal"], run.counts["deliveries"]) == ("holds", 3, 3, 6)
    assert {(record["route"], record["reason"]) for record in run.records} == {("quarantine", "UnknownSchema")}


class Gap(Exception):
    pass


@pytest.mark.claim("R15")
def test_every_kind_of_failure_ends_somewhere(either):
    errors = {"temporary": TimeoutError(), "terminal": KeyError("invoice"), "unknown": RuntimeError("?"), "defer": Gap()}

    def by_key(delivery, shop):
        raise errors[delivery.message.effect_key]
    policy = RetryPolicy(max_attempts=2, delays_ms=(20,), jitter=0, kinds={Gap: "defer"})
    run = either.run(by_key, [Message(kind) for kind in errors], retry=policy)
    assert {record["effect_key"]: record["route"] for record in run.records} == {
        "temporary": "manual-review", "terminal": "quarantine", "unknown": "manual-review", "defer": "manual-review"}
    assert (run.verdict, run.counts["terminal"], run.deliveries) == ("holds", 4, {"temporary": 2, "terminal": 1, "unknown": 1, "defer": 1})
    assert all(record["required_check"] for record in run.records)


@pytest.mark.claim("R10")
def test_the_mean_looks_fine_while_a_few_messages_fail_again_and_again(lab):
    def four_fail(delivery, shop):
        if delivery.message.payload["invoice"] % 75 == 0:
            raise TimeoutError
        remind_once(delivery, shop)
    healthy, sick = (lab.run(handler, lab.reminders(300), prefetch=20, retry=RetryPolicy(max_attempts=3, delays_ms=(100, 400), jitter=0)).measures
                     for handler in (remind_once, four_fail))
    assert (healthy.retries, healthy.terminal_share, sick.retries, sick.terminal_share) == (0, 0, 8, 4 / 300)
    assert sick.oldest_ms >= 500 > 5 * sick.mean_handling_ms


def charge(delivery, shop):
    shop.provider.charge(delivery.message.effect_key)
    remind_once(delivery, shop)


@pytest.mark.claim("R11")
def test_retries_in_step_come_as_one_wave_and_jitter_spreads_them(lab):
    def comes_back(jitter):
        lab.provider.reset()
        lab.provider.behave("down", calls=40)
        run = lab.run(charge, lab.reminders(40), prefetch=20, retry=RetryPolicy(max_attempts=2, delays_ms=(800,), jitter=jitter))
        assert (run.counts["once"], run.counts["charges"], run.counts["retries"]) == (40, 40, 40)
        return Counter(event.detail["delay_ms"] for event in run.events if event.name == "retry.publish" and event.phase == "after"), lab.provider.calls[40:]
    for _ in range(5):                                # a busy machine spreads them, too
        (in_step, one_wave), (spread, small_waves) = comes_back(0), comes_back(0.8)
        assert in_step == {800: 40} and sorted(spread) == [160, 480, 800, 1120, 1440] and max(spread.values()) <= 14
        if tallest_wave(one_wave, 250) >= 2 * tallest_wave(small_waves, 250):
            return
    pytest.fail("jitter did not halve the wave in any of five tries")


@pytest.mark.claim("R12")
@pytest.mark.parametrize(("how", "calls", "route"), [("down", 6, "manual-review"), ("busy", 6, "manual-review"), ("broken", 3, "manual-review")])
def test_a_dependency_that_never_gets_well_uses_the_budget_up_and_nothing_is_left(lab, how, calls, route):
    lab.provider.reset()
    lab.provider.behave(how)
    run = lab.run(charge, lab.reminders(3), retry=RetryPolicy(max_attempts=2, delays_ms=(20,), jitter=0))
    assert (run.verdict, run.facts.ending, run.counts["terminal"], run.counts["pending"], len(lab.provider.calls)) == ("holds", "over", 3, 0, calls)
    assert {record["route"] for record in run.records} == {route}
