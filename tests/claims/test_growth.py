"""The claims of chapter 9: growth and overload. The same experiments as in the notebook, on every broker under test."""
import os
import time

import pika
import pytest

from tests.claims.counting import numbers

NO_ADDRESS = ("invoice-10:reminder", "invoice-60:reminder")


def slow_letter(delivery, shop):
    time.sleep(0.02)                                  # the work; nothing in the tests waits for it
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def give_back(delivery, shop):
    time.sleep(0.005)
    if delivery.message.effect_key in NO_ADDRESS:
        delivery.nack(requeue=True)
    else:
        shop.ledger.record_once(delivery.message.effect_key)
        delivery.ack()


def three_tries(delivery, shop):
    if delivery.message.effect_key in NO_ADDRESS and delivery.attempt == 3:
        delivery.reject(requeue=False)
    else:
        give_back(delivery, shop)


def at_home(delivery, shop):
    time.sleep(0.1)
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def outside(delivery, shop):
    shop.provider.charge(delivery.message.effect_key, timeout_s=10)
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def two_machines(delivery, shop):
    if delivery.message.effect_key == "invoice-1:reminder":
        os.environ["SLOW_MACHINE"] = "yes"
    time.sleep(0.1 if "SLOW_MACHINE" in os.environ else 0.01)
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def thirds(watch, name):
    third = len(watch.samples) // 3
    return [getattr(watch.samples[at], name) for at in (third, 2 * third, -1)]


def grows(values):
    return all(earlier < later for earlier, later in zip(values, values[1:]))


def tries(run):
    return [run.deliveries[key] for key in NO_ADDRESS]


def seconds(run):
    return (run.events[-1].at_ms - next(event.at_ms for event in run.events if event.name == "receive")) / 1000


def handling_ms(run):
    """Returns the time that handlers spent with the two bad letters, and with the rest."""
    spent, began = {True: 0.0, False: 0.0}, {}
    for event in run.events:
        if (event.name, event.phase) == ("receive", "before"):
            began[event.lane] = event.at_ms
        elif event.name in ("returned", "raised"):
            spent[event.effect_key in NO_ADDRESS] += event.at_ms - began[event.lane]
    return spent[True], spent[False]


@pytest.fixture(scope="module")
def too_fast(lab):
    live = lab.start(slow_letter, lab.reminders(1000), publish="while", rate=100)
    watch = lab.watch(live, for_s=3)
    live.stop()
    live.wait()
    return watch


@pytest.mark.claim("G1")
def test_arrivals_above_the_services_make_queue_and_age_grow_as_long_as_they_last(too_fast):
    assert grows(thirds(too_fast, "waiting")) and grows(thirds(too_fast, "oldest_ms"))
    last = too_fast.samples[-1]
    assert last.arrivals > 1.5 * last.services and last.waiting + last.in_flight == last.arrivals - last.services
    assert last.ready is None or abs(last.ready - last.waiting) <= 20                     # the broker's word, and that of the events, a moment apart


@pytest.mark.claim("G1")
def test_arrivals_below_the_services_make_nothing_grow(lab, too_fast):
    live = lab.start(slow_letter, lab.reminders(20), publish="while", rate=10)
    watch, run = lab.watch(live), live.wait()
    assert run.counts["once"] == 20 and watch.samples[-1].oldest_ms == watch.samples[-1].waiting == 0
    assert max(sample.waiting for sample in watch.samples) < too_fast.samples[-1].waiting / 4


@pytest.mark.claim("G2")
def test_one_message_that_is_given_back_for_ever_takes_a_worker_with_prefetch_1_for_itself(lab):
    run = lab.run(give_back, lab.reminders(100), max_deliveries=100, deadline_s=60)
    assert run.facts.ending == "max_deliveries" and tries(run) == [101, 0]
    assert numbers(run, "published", "deliveries", "effects", "terminal", "pending") == (100, 110, 9, 0, 91)
    bad, good = handling_ms(run)
    assert bad / (bad + good) > 10 * 0.02


@pytest.mark.claim("G2")
def test_with_more_prefetch_it_holds_one_place_for_ever_and_a_limit_of_tries_frees_it(lab):
    ten = lab.run(give_back, lab.reminders(100), prefetch=10, max_deliveries=100, deadline_s=60)
    assert numbers(ten, "effects", "terminal") == (98, 0) and sum(tries(ten)) > ten.counts["deliveries"] / 2
    last_good = max(at for at, event in enumerate(ten.events) if event.name == "ack")
    while_there_was_work = sum(event.effect_key in NO_ADDRESS for event in ten.events[:last_good] if (event.name, event.phase) == ("nack", "after"))
    assert 10 <= while_there_was_work <= 60           # 2 of 10 places: 98 / 8 · 2 = 24
    limited = lab.run(three_tries, lab.reminders(100), deadline_s=60)
    assert numbers(limited, "deliveries", "effects", "terminal") == (98 + 2 * 3, 98, 2) and limited.verdict == "holds"
    assert (ten.measures.terminal_share, limited.measures.terminal_share) == (0, 0.02)
    assert ten.measures.mean_handling_ms < 2 * limited.measures.mean_handling_ms          # which is what hides it
    assert handling_ms(limited)[0] < handling_ms(ten)[0] / 4


@pytest.mark.claim("G2")
def test_deliveries_far_above_what_is_settled_tell_a_circle_from_a_worker_that_is_too_slow(lab, too_fast):
    live = lab.start(give_back, lab.reminders(500), publish="while", rate=30, max_deliveries=100, deadline_s=60)
    circle, run = lab.watch(live), live.wait()
    assert run.facts.ending == "max_deliveries"
    assert too_fast.samples[-1].deliveries <= too_fast.samples[-1].services + 1
    assert (circle.samples[-1].deliveries, circle.samples[-1].services) == (110, 9)
    assert grows(thirds(circle, "oldest_ms"))


@pytest.mark.claim("G3")
def test_more_workers_help_where_handling_is_the_limit_and_not_where_the_provider_is(lab):
    lab.provider.behave("well", ms=100, at_once=1)
    try:
        runs = {(handler, workers): lab.run(handler, lab.reminders(12), workers=workers, deadline_s=60) for handler in (at_home, outside) for workers in (1, 4)}
    finally:
        lab.provider.behave("well")
    assert all(run.counts["once"] == 12 for run in runs.values())
    assert seconds(runs[at_home, 1]) >= 1.2 > seconds(runs[at_home, 4])                     # 12 · 0.1 s
    assert seconds(runs[outside, 1]) >= 1.2 and seconds(runs[outside, 4]) >= 1.15           # the provider's clock may be a little ahead
    assert runs[outside, 4].measures.mean_handling_ms > 1.75 * runs[outside, 1].measures.mean_handling_ms
    assert runs[at_home, 4].measures.mean_handling_ms < 1.75 * runs[at_home, 1].measures.mean_handling_ms


@pytest.mark.claim("A5")
def test_prefetch_1_spreads_the_work_by_what_each_worker_can_do_and_a_large_one_deals_it_out(lab):
    def by_the_slow_one(run):
        acks = [event for event in run.events if (event.name, event.phase) == ("ack", "after")]
        slow = next(event.lane for event in acks if event.effect_key == "invoice-1:reminder")
        return sum(event.lane == slow for event in acks)
    many, single = (lab.run(two_machines, lab.reminders(20), workers=2, prefetch=prefetch) for prefetch in (10, 1))
    assert many.counts["once"] == single.counts["once"] == 20
    assert by_the_slow_one(many) == 10 > by_the_slow_one(single)
    assert seconds(single) < seconds(many)


def test_what_a_full_queue_drops_and_what_its_publisher_is_told(lab):
    channel = pika.BlockingConnection(lab.broker.address.parameters()).channel()
    channel.confirm_delivery()
    queue, seen = lab.queue("letters"), []

    def publish(letter):
        try:
            channel.basic_publish("", queue, letter, pika.BasicProperties(delivery_mode=2), mandatory=True)
            return True
        except pika.exceptions.NackError:
            return False
    for limit in ({}, {"x-max-length": 3}, {"x-max-length": 3, "x-overflow": "reject-publish"}, {"x-message-ttl": 0}):
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "classic", "x-expires": 600_000, **limit})
        confirmed = [publish(letter) for letter in "ABCDE"]
        taken = [channel.basic_get(queue, auto_ack=True)[2] for _ in "ABCDE"]
        seen.append((sum(confirmed), b"".join(filter(None, taken)).decode()))
        channel.queue_delete(queue)
    channel.connection.close()
    assert seen == [(5, "ABCDE"), (5, "CDE"), (3, "ABC"), (5, "")]
