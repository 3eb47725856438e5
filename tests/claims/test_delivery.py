"""The claims of chapter 1: delivery is not effect. The same experiments as in the notebook, on every broker under test."""
import json
import sqlite3
from contextlib import closing

import pika
import pytest

from labkit import Message, crash, hang
from tests.claims.counting import handed_over, numbers
from tests.engine.handlers import effect_then_ack, once_then_ack

AFTER_LETTER_3 = crash.after("ledger.record", message=3)


def rows(run, statement):
    with closing(sqlite3.connect(run.ledger)) as db:
        return db.execute(statement).fetchall()


@pytest.mark.claim("D1")
def test_a_task_keeps_its_names_over_every_attempt_and_gets_a_new_tag_for_each(lab):
    def note_names(delivery, shop):
        message = delivery.message
        names = [message.message_id, message.effect_key, message.sequence_key, message.sequence_number, delivery.attempt, delivery.tag]
        shop.ledger.record(message.effect_key, names=names)
        delivery.ack()
    run = lab.run(note_names, lab.status_events("order-7", [1, 2, 3]), faults=[crash.after("ledger.record", message=2)])
    assert [json.loads(detail)["names"] for detail, in rows(run, "SELECT detail FROM effects ORDER BY id")] == [
        ["order-7-status-1", "order-7:status-1", "order-7", 1, 1, 1],
        ["order-7-status-2", "order-7:status-2", "order-7", 2, 1, 2],
        ["order-7-status-2", "order-7:status-2", "order-7", 2, 2, 1],
        ["order-7-status-3", "order-7:status-3", "order-7", 3, 1, 2]]
    assert rows(run, "SELECT message_id, attempt FROM deliveries WHERE effect_key = 'order-7:status-2'") == [
        ("order-7-status-2", 1), ("order-7-status-2", 2)]


@pytest.mark.claim("D2")
def test_a_death_between_effect_and_ack_makes_a_second_effect_of_a_second_delivery(lab):
    names = ("published", "deliveries", "effects", "once", "duplicated", "lost")
    wrong = lab.run(effect_then_ack, lab.reminders(5), faults=[AFTER_LETTER_3])
    assert numbers(wrong, *names) == (5, 6, 6, 4, 1, 0)
    assert (wrong.verdict, wrong.why) == ("broken", "invoice-3:reminder was recorded 2 times")
    right = lab.run(once_then_ack, lab.reminders(5), faults=[crash.after("ledger.record_once", message=3)])
    assert numbers(right, *names) == (5, 6, 5, 5, 0, 0)
    assert right.verdict == "holds"


@pytest.mark.claim("D2")
def test_it_happens_to_every_kind_of_effect(lab):
    tasks = [Message("invoice-1:reminder"), Message("order-1:shipment"), Message("order-1:invoice")]
    run = lab.run(effect_then_ack, tasks, faults=[crash.after("ledger.record", message=n) for n in (1, 2, 3)])
    assert numbers(run, "published", "deliveries", "effects") == (3, 6, 6)
    assert run.statuses == {"invoice-1:reminder": "duplicated", "order-1:shipment": "duplicated", "order-1:invoice": "duplicated"}


@pytest.mark.claim("D4")
@pytest.mark.parametrize(("fault", "redelivered", "not_redelivered"), [
    (crash.before("ledger.record", message=3), (6, 5, 0, 0), (3, 2, 0, 3)),
    (AFTER_LETTER_3, (6, 6, 1, 0), (3, 3, 0, 2))], ids=["before the effect", "after the effect"])
def test_without_redelivery_the_duplicate_goes_and_tasks_are_lost(lab, fault, redelivered, not_redelivered):
    def effect_only_or_ack(delivery, shop):
        shop.ledger.record(delivery.message.effect_key)
        if not delivery.settled:
            delivery.ack()
    for acknowledge, expected in (("manual", redelivered), ("auto", not_redelivered)):
        run = lab.run(effect_only_or_ack, lab.reminders(5), faults=[fault], acknowledge=acknowledge)
        assert numbers(run, "deliveries", "effects", "duplicated", "lost") == expected


@pytest.mark.claim("D5")
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_a_delivery_comes_back_when_its_channel_or_its_connection_closes_and_not_before(lab, queue_type):
    queue = lab.queue(f"comes-back-{queue_type}")

    def connect():
        return pika.BlockingConnection(lab.broker.address.parameters())

    def take(channel):
        method, _, body = next(channel.consume(queue, inactivity_timeout=10))
        return body, method.redelivered
    holder, connection = connect(), connect()
    watcher = connection.channel()
    try:
        watcher.queue_declare(queue, durable=True, arguments={"x-queue-type": queue_type, "x-expires": 60_000})
        watcher.confirm_delivery()
        watcher.basic_publish("", queue, b"please pay", pika.BasicProperties(delivery_mode=2), mandatory=True)
        first, second = holder.channel(), holder.channel()
        assert take(first) == (b"please pay", False)
        assert watcher.basic_get(queue)[0] is None
        first.close()
        assert take(second) == (b"please pay", True)
        assert watcher.basic_get(queue)[0] is None
        holder.close()
        assert take(watcher) == (b"please pay", True)
    finally:
        watcher.queue_delete(queue)
        connection.close()


@pytest.mark.claim("D5")
def test_a_delivery_comes_back_when_its_worker_dies_and_not_while_it_is_slow(lab):
    slow = lab.run(once_then_ack, lab.reminders(1), workers=2, faults=[hang.at("ack", seconds=1)])
    assert numbers(slow, "deliveries", "effects", "once") == (1, 1, 1)
    assert [event.name for event in slow.events if event.name in ("stopped", "continued")] == ["stopped", "continued"]
    dead = lab.run(once_then_ack, lab.reminders(1), workers=2, faults=[crash.before("ack")])
    assert numbers(dead, "deliveries", "effects", "once") == (2, 1, 1)


@pytest.mark.claim("D6")
def test_the_flag_is_on_what_was_never_processed_and_not_on_what_was_published_twice(lab):
    def trust_the_flag(delivery, shop):
        if not delivery.redelivered:
            shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    messages = lab.reminders(3) + lab.reminders(1)
    names = ("deliveries", "effects", "once", "duplicated", "lost")
    wrong = lab.run(trust_the_flag, messages, prefetch=3, faults=[crash.before("ledger.record", message=1)])
    flags = [(event.message_id, event.attempt, event.detail["redelivered"]) for event in handed_over(wrong)]
    assert flags == [("reminder-1", 1, False), ("reminder-1", 2, True), ("reminder-2", 1, True), ("reminder-3", 1, True), ("reminder-1", 3, False)]
    assert numbers(wrong, *names) == (5, 1, 1, 0, 2)
    right = lab.run(once_then_ack, messages, prefetch=3, faults=[crash.before("ledger.record_once", message=1)])
    assert [(event.message_id, event.attempt, event.detail["redelivered"]) for event in handed_over(right)] == flags
    assert numbers(right, *names) == (5, 3, 3, 0, 0)
    assert numbers(lab.run(trust_the_flag, messages, prefetch=3), *names) == (4, 4, 2, 1, 0)
    assert numbers(lab.run(once_then_ack, messages, prefetch=3), *names) == (4, 3, 3, 0, 0)


@pytest.mark.claim("D7")
def test_exactly_once_holds_inside_one_system_and_not_across_two(lab):
    def two_rows(delivery, shop):
        with shop.ledger.transaction():
            shop.ledger.record(delivery.message.effect_key)
            shop.ledger.remember(delivery.message.message_id)
        if not delivery.settled:
            delivery.ack()
    inside = lab.sweep(two_rows, lab.reminders(1), acknowledge="auto")
    both = {row.point: (row.effects, rows(row.run, "SELECT count(*) FROM inbox")[0][0]) for row in inside.rows}
    assert both == dict.fromkeys(both, (0, 0)) | {"no crash": (1, 1), "after ledger.commit": (1, 1)}
    assert len(both) == 11 and all(row.run.facts.fired == [1] * len(row.faults) for row in inside.rows)
    across = lab.sweep(two_rows, lab.reminders(1))
    assert {row.point for row in across.rows if row.status == "duplicated"} == {"after ledger.commit", "before ack"}
    assert {row.status for row in across.rows} == {"once", "duplicated"} and len(across.rows) == 13
    reachable = lab.sweep(once_then_ack, lab.reminders(1))
    assert (reachable.verdict, {row.effects for row in reachable.rows}, max(row.deliveries for row in reachable.rows)) == ("holds", {1}, 2)


@pytest.mark.claim("D8")
def test_a_burst_waits_for_workers_that_are_not_there_yet_and_for_those_that_died(lab):
    both_die = [crash.before("ledger.record_once", worker=worker) for worker in (1, 2)]
    run = lab.run(once_then_ack, lab.reminders(200), workers=2, faults=both_die)
    names = [event.name for event in run.events]
    assert names[:names.index("started")].count("published") == 200
    assert names.count("killed") == 2
    assert numbers(run, "published", "deliveries", "effects", "once", "lost") == (200, 202, 200, 200, 0)


@pytest.mark.claim("D9")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
@pytest.mark.parametrize("prefetch", [5, 1])
def test_no_setting_of_the_broker_makes_the_effect_once_and_the_key_does_under_each(lab, queue_type, prefetch):
    names, settings = ("published", "deliveries", "effects", "duplicated"), {"queue_type": queue_type, "prefetch": prefetch}
    wrong = lab.run(effect_then_ack, lab.reminders(5), faults=[AFTER_LETTER_3], **settings)
    assert numbers(wrong, *names) == (5, 6, 6, 1)
    right = lab.run(once_then_ack, lab.reminders(5), faults=[crash.after("ledger.record_once", message=3)], **settings)
    assert numbers(right, *names) == (5, 6, 5, 0)
