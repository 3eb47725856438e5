"""The claims of chapter 2: when to acknowledge. The same experiments as in the notebook, on every broker under test."""
import itertools
import time

import pika
import pytest

from labkit import Lab, Message, crash, hang, lose
from labkit.broker import find
from tests.claims.counting import handed_over, numbers
from tests.engine.handlers import ack_then_effect, ack_twice, effect_then_ack, once_then_ack

BETWEEN_EARLY, BETWEEN_LATE = crash.after("ack", message=3), crash.after("ledger.record", message=3)
UNKNOWN_TAG_1 = (406, "PRECONDITION_FAILED - unknown delivery tag 1")


def ack_then_once(delivery, shop):
    delivery.ack()
    shop.ledger.record_once(delivery.message.effect_key)


def ack_inside(delivery, shop):
    with shop.ledger.transaction():
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()


def ack_after_commit(delivery, shop):
    with shop.ledger.transaction():
        shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def ack_every_fifth(delivery, shop):
    shop.ledger.record(delivery.message.effect_key)
    if delivery.tag % 5 == 0:
        delivery.ack(multiple=True)


def broken_points(sweep):
    return {row.point: row.status for row in sweep.rows if row.status != "once"}


def came_back(run):
    return sum(event.detail["redelivered"] for event in handed_over(run))


def written(run):
    return [event.effect_key for event in run.events if event.name == "ledger.record" and event.phase == "after"]


@pytest.mark.claim("A1")
def test_an_ack_before_the_effect_loses_the_task_and_one_after_it_repeats_it(lab):
    names = ("published", "deliveries", "effects", "once", "duplicated", "lost")
    early = lab.run(ack_then_effect, lab.reminders(5), faults=[BETWEEN_EARLY])
    late = lab.run(effect_then_ack, lab.reminders(5), faults=[BETWEEN_LATE])
    assert numbers(early, *names) == (5, 5, 4, 4, 0, 1)
    assert numbers(late, *names) == (5, 6, 6, 4, 1, 0)
    assert (early.statuses["invoice-3:reminder"], late.statuses["invoice-3:reminder"]) == ("lost", "duplicated")


@pytest.mark.claim("A1")
def test_of_all_crash_points_only_the_gap_harms_and_only_a_late_ack_with_a_key_closes_it(lab):
    def sweep(handler):
        found = lab.sweep(handler, lab.reminders(1))
        assert len(found.rows) == 7
        return broken_points(found)
    assert sweep(ack_then_effect) == {"after ack": "lost", "before ledger.record": "lost"}
    assert sweep(effect_then_ack) == {"after ledger.record": "duplicated", "before ack": "duplicated"}
    assert sweep(ack_then_once) == {"after ack": "lost", "before ledger.record_once": "lost"}
    assert sweep(once_then_ack) == {}


@pytest.mark.claim("A2")
def test_an_ack_inside_the_open_transaction_loses_what_the_database_then_undoes(lab):
    names, before_commit = ("published", "deliveries", "effects", "once", "lost"), [crash.before("ledger.commit", message=3)]
    assert numbers(lab.run(ack_inside, lab.reminders(5), faults=before_commit), *names) == (5, 5, 4, 4, 1)
    assert numbers(lab.run(ack_after_commit, lab.reminders(5), faults=before_commit), *names) == (5, 6, 5, 5, 0)
    assert broken_points(lab.sweep(ack_inside, lab.reminders(1))) == {"after ack": "lost", "before ledger.commit": "lost"}
    assert broken_points(lab.sweep(ack_after_commit, lab.reminders(1))) == {"after ledger.commit": "duplicated", "before ack": "duplicated"}


@pytest.mark.claim("A3")
@pytest.mark.parametrize("handler, effects, duplicated", [(effect_then_ack, 6, 1), (once_then_ack, 5, 0)])
def test_an_ack_that_left_the_worker_and_did_not_arrive_brings_the_delivery_back(lab, handler, effects, duplicated):
    run = lab.run(handler, lab.reminders(5), faults=[lose.ack(message=3)])
    assert numbers(run, "published", "deliveries", "effects", "duplicated", "lost") == (5, 6, effects, duplicated, 0)
    dropped, = [event for event in run.events if event.name == "ack.dropped"]
    assert (dropped.position, dropped.detail["relay"]) == (3, "dropped: basic.ack, channel 1, tag 3; connection cut")
    outcomes = [(event.attempt, event.detail["outcome"]) for event in run.events
                if event.name == "ack" and event.phase == "after" and event.position == 3]
    assert outcomes == [(1, "unknown"), (2, "sent")]


@pytest.mark.claim("A3")
def test_an_ack_that_arrived_brings_nothing_back_although_the_worker_dies_right_after_it(lab):
    run = lab.run(effect_then_ack, lab.reminders(5), faults=[crash.after("ack", message=3)])
    assert numbers(run, "published", "deliveries", "effects", "duplicated", "lost") == (5, 5, 5, 0, 0)


@pytest.fixture
def letters(lab, broker):
    """Five letters in a queue of our own; gives (channel(), take(channel, count)), where take returns (letter, tag) pairs."""
    queue, connections = lab.queue("letters"), []

    def channel():
        connections.append(pika.BlockingConnection(broker.address.parameters()))
        return connections[-1].channel()

    def take(channel, count):
        deliveries = itertools.islice(channel.consume(queue, inactivity_timeout=5), count)
        return [(body.decode(), method.delivery_tag) for method, _, body in deliveries]

    first = channel()
    first.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum", "x-expires": 600_000})
    first.confirm_delivery()
    for letter in "ABCDE":
        first.basic_publish("", queue, letter.encode(), pika.BasicProperties(delivery_mode=2))
    yield channel, take
    for connection in connections:
        if connection.is_open:
            connection.close()
    with pika.BlockingConnection(broker.address.parameters()) as connection:
        connection.channel().queue_delete(queue)


def error_of(channel):
    """Asks the broker something, and returns the error with which it has closed the channel, or None."""
    try:
        channel.basic_qos(prefetch_count=0)
    except pika.exceptions.ChannelClosedByBroker as error:
        return error.reply_code, error.reply_text


@pytest.mark.claim("A4")
def test_a_second_ack_of_a_tag_closes_the_channel_and_what_it_held_comes_back(letters):
    channel, take = letters
    twice = channel()
    assert take(twice, 2) == [("A", 1), ("B", 2)]
    twice.basic_ack(1)
    assert error_of(twice) is None
    twice.basic_ack(1)
    assert error_of(twice) == UNKNOWN_TAG_1
    assert sorted(take(channel(), 4)) == [("B", 1), ("C", 2), ("D", 3), ("E", 4)]


@pytest.mark.claim("A4")
def test_an_ack_on_another_channel_closes_that_one_and_the_owner_keeps_its_delivery(letters):
    channel, take = letters
    owner = channel()
    foreign = owner.connection.channel()
    assert take(owner, 1) == [("A", 1)]
    foreign.basic_ack(1)
    assert error_of(foreign) == UNKNOWN_TAG_1
    owner.basic_ack(1)
    assert error_of(owner) is None


@pytest.mark.claim("A4")
def test_multiple_answers_every_earlier_tag_too(letters):
    channel, take = letters
    several = channel()
    assert [tag for _, tag in take(several, 5)] == [1, 2, 3, 4, 5]
    several.basic_ack(3, multiple=True)
    several.connection.close()
    assert sorted(letter for letter, _ in take(channel(), 2)) == ["D", "E"]


@pytest.mark.claim("A4")
def test_a_handler_that_acks_twice_is_told_so_and_throws_back_what_its_worker_held(lab):
    wrong = lab.run(ack_twice, lab.reminders(5), prefetch=5)
    assert (wrong.verdict, came_back(wrong)) == ("broken", 4)
    assert "a second answer, or a foreign tag" in wrong.why and "406 PRECONDITION_FAILED - unknown delivery tag 1" in wrong.why
    right = lab.run(effect_then_ack, lab.reminders(5), prefetch=5)
    assert (right.verdict, came_back(right)) == ("holds", 0)


@pytest.mark.claim("A5")
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("prefetch", [1, 5, 20])
def test_a_crash_throws_back_as_many_deliveries_as_the_worker_held(lab, queue_type, prefetch):
    run = lab.run(effect_then_ack, lab.reminders(20), prefetch=prefetch, queue_type=queue_type, faults=[crash.before("ledger.record", message=1)])
    assert came_back(run) == prefetch
    assert numbers(run, "published", "deliveries", "effects", "duplicated") == (20, 21, 20, 0)


@pytest.mark.claim("A5")
def test_acks_that_are_saved_up_double_every_effect_that_still_waited_for_one(lab):
    names, fault = ("published", "deliveries", "effects", "once", "duplicated"), crash.after("ledger.record", message=10)
    batched = lab.run(ack_every_fifth, lab.reminders(20), prefetch=5, faults=[fault])
    single = lab.run(effect_then_ack, lab.reminders(20), prefetch=5, faults=[fault])
    assert (came_back(batched), *numbers(batched, *names)) == (5, 20, 25, 25, 15, 5)
    assert (came_back(single), *numbers(single, *names)) == (5, 20, 21, 21, 19, 1)


@pytest.mark.claim("A5")
@pytest.mark.parametrize("prefetch, others", [(10, 10), (1, 19)])
def test_a_small_prefetch_lets_the_free_worker_take_what_the_busy_one_would_hold(lab, prefetch, others):
    def one_long_letter(delivery, shop):
        if delivery.message.effect_key == "invoice-1:reminder":
            while shop.ledger.find("invoice-20:reminder") is None:
                time.sleep(0.01)
        effect_then_ack(delivery, shop)
    run = lab.run(one_long_letter, lab.reminders(20), workers=2, prefetch=prefetch)
    assert written(run).index("invoice-1:reminder") == others
    assert numbers(run, "published", "deliveries", "effects", "once") == (20, 20, 20, 20)


@pytest.mark.claim("A6")
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("verb", ["reject", "nack"])
def test_a_refusal_goes_to_the_dead_letter_exchange_and_without_one_nowhere(lab, queue_type, verb):
    def refuse(delivery, shop):
        getattr(delivery, verb)(requeue=False)
    names = ("published", "deliveries", "effects", "dead_lettered", "terminal", "lost")
    without = lab.run(refuse, lab.reminders(2), queue_type=queue_type, dead_letter=False)
    with_one = lab.run(refuse, lab.reminders(2), queue_type=queue_type)
    assert (without.verdict, *numbers(without, *names)) == ("broken", 2, 2, 0, 0, 0, 2)
    assert (with_one.verdict, *numbers(with_one, *names)) == ("holds", 2, 2, 0, 2, 2, 0)


@pytest.mark.claim("A7")
def test_of_readings_an_early_ack_loses_one_and_a_late_ack_counts_one_twice(lab):
    readings = [Message(f"boiler:minute-{minute}", schema="reading.v1") for minute in range(1, 11)]
    names = ("published", "deliveries", "effects", "duplicated", "lost")
    late = lab.run(effect_then_ack, readings, faults=[crash.after("ledger.record", message=4)])
    early = lab.run(ack_then_effect, readings, faults=[crash.after("ack", message=4)])
    assert numbers(late, *names) == (10, 11, 11, 1, 0)
    assert numbers(early, *names) == (10, 10, 9, 0, 1)
    assert (written(late)[-1], written(early)[-1]) == ("boiler:minute-10", "boiler:minute-10")


@pytest.mark.claim("A7")
def test_a_job_that_publishes_what_is_missing_restores_what_an_early_ack_lost(lab):
    reminders = lab.reminders(5)
    day = lab.run(ack_then_effect, reminders, faults=[BETWEEN_EARLY])
    missing = [message for message in reminders if message.effect_key not in day.facts.effects]
    assert [message.effect_key for message in missing] == ["invoice-3:reminder"]
    night = lab.run(ack_then_effect, missing, continue_from=day)
    assert (night.verdict, *numbers(night, "published", "deliveries", "effects", "lost", "stray")) == ("holds", 1, 1, 1, 0, 0)
    assert night.facts.effects == {message.effect_key: 1 for message in reminders}


@pytest.mark.claim("A8")
def test_a_nack_undoes_no_effect(lab):
    def letter_then_ask(delivery, shop):
        shop.ledger.record(delivery.message.effect_key)
        delivery.nack() if delivery.attempt == 1 else delivery.ack()

    def ask_then_letter(delivery, shop):
        if delivery.attempt == 1:
            delivery.nack()
        else:
            effect_then_ack(delivery, shop)
    names = ("published", "deliveries", "effects", "duplicated")
    assert numbers(lab.run(letter_then_ask, lab.reminders(1)), *names) == (1, 2, 2, 1)
    assert numbers(lab.run(ask_then_letter, lab.reminders(1)), *names) == (1, 2, 1, 0)


@pytest.fixture(scope="module")
def impatient(server):
    """A lab on a node of its own that waits 0.3 s for an ack."""
    with find(private=True, settings={"consumer_timeout": 300, "channel_tick_interval": 100}, server=server) as broker:
        with Lab(broker=broker, quiet=True) as lab:
            yield lab


FROZEN = [hang.at("ack", seconds=1)]


@pytest.mark.claim("D5")
def test_a_delivery_comes_back_when_the_acknowledgement_timeout_passes_and_the_key_keeps_one_effect(impatient):
    names = ("published", "deliveries", "effects", "duplicated")
    assert numbers(impatient.run(effect_then_ack, impatient.reminders(1)), *names) == (1, 1, 1, 0)
    assert numbers(impatient.run(effect_then_ack, impatient.reminders(1), faults=FROZEN), *names) == (1, 2, 2, 1)
    assert numbers(impatient.run(once_then_ack, impatient.reminders(1), faults=FROZEN), *names) == (1, 2, 1, 0)


@pytest.mark.claim("D5")
def test_each_version_tells_the_timeout_in_its_own_way_and_since_4_3_classic_queues_have_none(impatient):
    def told(queue_type):
        run = impatient.run(once_then_ack, impatient.reminders(1), queue_type=queue_type, faults=FROZEN)
        return run.verdict, run.counts["deliveries"], [(event.name, event.detail.get("code")) for event in run.events
                                                       if event.name in ("channel.closed", "cancelled")]
    closed, cancelled = ("holds", 2, [("channel.closed", 406)]), ("holds", 2, [("cancelled", None)])
    newer = tuple(map(int, impatient.broker.version.split(".")[:2])) >= (4, 3)
    assert told("quorum") == (cancelled if newer else closed)
    assert told("classic") == (("holds", 1, []) if newer else closed)
