"""The claims of chapter 4: publishing. The same experiments as in the notebook, on every broker under test."""
import itertools
import uuid
from collections import Counter

import pika
import pytest

from labkit import BrokerError, Lab, Message, PlanError, crash, hops, lose, publish_outbox, topology
from labkit.databases import SqlitePlace
from tests.claims.counting import handed_over, numbers
from tests.engine.handlers import effect_then_ack, once_then_ack
from tests.engine.producers import ORDER, by_last_id, commit_first, late_commit, publish_first, three_orders, with_outbox

MESSAGES = 200


def inbox_then_ack(delivery, shop):
    with shop.ledger.transaction():
        if shop.ledger.remember(delivery.message.message_id) == "new":
            shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def ends(sweep):
    """Status -> crash points that end with it, where there are some."""
    return {status: number for status, number in sweep.counts.items() if number}


@pytest.mark.claim("P1")
def test_a_dual_write_loses_the_event_or_the_order_whichever_comes_second(either):
    lost = either.sweep(commit_first)
    assert (lost.verdict, ends(lost)) == ("broken", {"nothing": 5, "lost": 2, "once": 3})
    assert [row.point for row in lost.rows if row.status == "lost"] == ["after ledger.commit", "before publish"]
    assert lost.why == "after ledger.commit: order-1 is there, and its event was lost (2 of 10 crash points are broken)"
    stray = either.sweep(publish_first)
    assert (stray.verdict, ends(stray)) == ("broken", {"nothing": 1, "stray": 8, "once": 1})
    assert {tuple(row.numbers) for row in stray.rows if row.status == "stray"} == {(0, 1)}


@pytest.mark.claim("P1")
def test_no_rollback_takes_back_what_was_published_inside_the_transaction(either):
    def publish_inside(shop):
        with shop.ledger.transaction():
            shop.ledger.record(ORDER)
            shop.publish(Message(ORDER))
    assert ends(either.sweep(publish_inside)) == {"nothing": 5, "stray": 4, "once": 1}


@pytest.mark.claim("P2")
def test_no_crash_point_of_the_outbox_loses_an_event_and_none_makes_one_without_an_order(either):
    sweep = either.sweep(with_outbox, relay=publish_outbox)
    assert (sweep.verdict, ends(sweep)) == ("holds", {"nothing": 7, "once": 7, "repeated": 6})
    assert sweep.why == "at each of 20 crash points, every order has its event"
    assert all(row.run.facts.fired == [1] and row.run.counts["ids"] == row.run.counts["orders"] for row in sweep.rows[1:])
    assert [row.point for row in sweep.rows if row.status == "repeated"][0] == "relay after publish"
    assert max(row.run.counts["events"] for row in sweep.rows) == 2


@pytest.mark.claim("P2")
def test_what_a_relay_publishes_twice_is_one_effect_of_a_consumer_with_an_inbox(either):
    produced = either.produce(with_outbox, relay=publish_outbox, faults=[crash.after("confirm", worker="relay")])
    assert numbers(produced, "orders", "events", "ids", "repeated") == (1, 2, 1, 1)
    without, with_inbox = (either.run(handler, produced.published) for handler in (effect_then_ack, inbox_then_ack))
    assert (without.verdict, *numbers(without, "published", "effects")) == ("broken", 2, 2)
    assert (with_inbox.verdict, *numbers(with_inbox, "published", "effects")) == ("holds", 2, 1)


@pytest.mark.claim("P2")
def test_two_relays_of_which_one_dies_lose_nothing_and_keep_the_order(either):
    for step in ("publish", "confirm", "outbox.mark", "ledger.commit"):
        run = either.produce(three_orders, relay=publish_outbox, relays=2, faults=[crash.after(step, worker="relay")])
        first_seen = list(dict.fromkeys(event.effect_key for event in run.published))
        assert (run.verdict, first_seen, run.facts.fired) == ("holds", ["order-1", "order-2", "order-3"], [1])
        assert numbers(run, "events", "ids") == (3 if step == "ledger.commit" else 4, 3)


@pytest.mark.claim("P2")
def test_a_row_that_commits_late_is_skipped_by_a_last_id_and_not_by_a_mark(either):
    one_writer = isinstance(either.produce(commit_first).ledger, SqlitePlace)             # whose ids come in the order of the commits
    assert numbers(late_commit(either, by_last_id), "orders", "events") == (2, 2 if one_writer else 1)
    marked = late_commit(either, publish_outbox)
    assert (marked.verdict, *numbers(marked, "orders", "ids")) == ("holds", 2, 2)


@pytest.mark.claim("P3")
def test_a_publisher_is_told_the_same_of_a_lost_message_and_of_a_lost_confirm(either):
    for fault, events, status in ((lose.publish(), 0, "lost"), (lose.confirm(), 1, "once")):
        run = either.produce(commit_first, faults=[fault])
        assert (run.facts.printed, run.facts.fired, run.counts["events"], run.statuses) == ("unknown\n", [1], events, {ORDER: status})


@pytest.mark.claim("P3")
@pytest.mark.parametrize(("fault", "new_id_each_try", "same_id"), [(lose.publish(), (1, 1, 1), (1, 1, 1)), (lose.confirm(), (2, 2, 2), (2, 1, 1))],
                         ids=["the message is lost", "the confirm is lost"])
def test_published_again_until_it_is_confirmed_it_is_one_effect_under_one_id_only(either, fault, new_id_each_try, same_id):
    def until_confirmed(new_id):
        def producer(shop):
            shop.ledger.record(ORDER)
            while shop.publish(Message(ORDER, new_id())) != "confirmed":
                pass
        return producer
    for producer, relay, expected in ((until_confirmed(lambda: str(uuid.uuid4())), None, new_id_each_try),
                                      (until_confirmed(lambda: "order-1:placed"), None, same_id), (with_outbox, publish_outbox, same_id)):
        produced = either.produce(producer, relay=relay, faults=[fault])
        effects = either.run(inbox_then_ack, produced.published).counts["effects"]
        assert (produced.facts.fired, *numbers(produced, "events", "ids"), effects) == ([1], *expected)


@pytest.mark.claim("P4")
@pytest.mark.parametrize(("where", "plan", "told"), [
    ({"to": "nowhere"}, {}, ["returned", "confirmed", "sent"]), ({"full": True}, {"max_length": 1}, ["nacked", "nacked", "sent"]),
    ({}, {"faults": [lose.publish()]}, ["unknown", "unknown", "sent"])], ids=["no such queue", "a full queue", "lost on its way"])
def test_a_loss_is_told_with_confirms_and_mandatory_and_silent_without(lab, where, plan, told):
    def place_order(full=False, **how):
        def producer(shop):
            while full and shop.publish(Message("order-0")) == "confirmed":
                pass
            shop.ledger.record(ORDER)
            print(shop.publish(Message(ORDER), **how))
        return producer
    for how, outcome in zip(({}, {"mandatory": False}, {"mandatory": False, "confirm": False}), told):
        run = lab.produce(place_order(**where, **how), **plan)
        assert (run.facts.printed, run.statuses[ORDER], all(run.facts.fired)) == (f"{outcome}\n", "lost", True)


@pytest.mark.claim("P4")
def test_pika_raises_for_what_is_unroutable_and_mandatory_and_says_nothing_for_what_is_not(lab):
    with pika.BlockingConnection(lab.broker.address.parameters()) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        assert channel.basic_publish("", lab.queue("nowhere"), b"order-1") is None
        with pytest.raises(pika.exceptions.UnroutableError):
            channel.basic_publish("", lab.queue("nowhere"), b"order-1", mandatory=True)


@pytest.mark.claim("D10")
def test_a_follow_up_event_under_a_derived_id_is_suppressed_by_the_next_consumer_and_hops_join_both(either):
    def tells(new_id):
        def handler(delivery, shop):
            with shop.ledger.transaction():
                if shop.ledger.remember(delivery.message.message_id) == "new":
                    shop.ledger.record(delivery.message.effect_key)
            shop.publish(Message(f"{delivery.message.effect_key}:shipped", new_id(delivery), correlation_id=delivery.message.correlation_id))
            delivery.ack()
        return handler
    for new_id, ids, bills in ((lambda delivery: str(uuid.uuid4()), 2, 2), (lambda delivery: f"{delivery.message.effect_key}:shipped", 1, 1)):
        shipped = either.run(tells(new_id), [Message(ORDER, correlation_id="case-7")], faults=[crash.before("ack")])
        assert numbers(shipped, "deliveries", "effects") == (2, 1)
        assert Counter(event.correlation_id for event in shipped.published) == {"case-7": 2}
        assert len({event.message_id for event in shipped.published}) == ids
        billed = either.run(inbox_then_ack, shipped.published)
        assert (billed.verdict, billed.counts["effects"]) == ("holds" if bills == 1 else "broken", bills)
        assert [event.detail["redelivered"] for event in handed_over(billed)] == [False, False]
        received = [(row["effect key"], row["attempt"]) for row in hops("case-7", shipped, billed).rows if row["what"] == "receive"]
        assert received[:2] == [(ORDER, 1), (ORDER, 2)] and [key for key, _ in received[2:]] == ["order-1:shipped"] * 2


@pytest.mark.claim("P5")
def test_a_killed_broker_keeps_what_was_confirmed_persistent_and_in_a_durable_queue_and_promises_nothing_else(own_lab):
    survival = own_lab.survival(messages=MESSAGES)
    rows = {(row.queue, row.durable, row.persistent, row.confirmed): row for row in survival.rows}
    kinds, both = [("classic", True), ("classic", False), ("quorum", True)], (True, False)
    assert list(rows) == [(*kind, persistent, confirmed) for kind, persistent, confirmed in itertools.product(kinds, both, both)]
    kept = {("classic", True, True, True), ("quorum", True, True, True), ("quorum", True, False, True)}
    chance = {("classic", True, True, False), ("quorum", True, True, False), ("quorum", True, False, False)}
    for what, row in rows.items():
        least, most = (MESSAGES, MESSAGES) if what in kept else (0, MESSAGES) if what in chance else (0, 0)
        assert row.published == MESSAGES and least <= row.survived <= most, row
        assert row.word == ("all" if row.survived == MESSAGES else "some" if row.survived else "none")
    assert {what for what, row in rows.items() if row.promised} == kept
    assert str(survival.certain) == """\
holds: 400 of 400 confirmed messages survived that were persistent in a durable queue, and 200 of 200 that were transient in a quorum queue
the broker's process was killed, and started again

queue                 message     publisher      published  survived  kept  promised
classic, durable      persistent  confirmed            200       200  all   yes
classic, durable      transient   confirmed            200         0  none  no
classic, durable      transient   not confirmed        200         0  none  no
classic, not durable  persistent  confirmed            200         0  none  no
classic, not durable  persistent  not confirmed        200         0  none  no
classic, not durable  transient   confirmed            200         0  none  no
classic, not durable  transient   not confirmed        200         0  none  no
quorum, durable       persistent  confirmed            200       200  all   yes
quorum, durable       transient   confirmed            200       200  all   yes"""
    _check_that_nothing_is_left(own_lab, len(rows))


@pytest.mark.claim("P5")
def test_where_the_broker_refuses_queues_that_are_not_durable_their_rows_say_so(own, own_lab):
    _permit_no_transient_queues_until_it_is_started_again(own)
    survival = own_lab.survival(messages=1)
    expected = (0, None, "refused by this broker") if own.version >= "4" else (1, 0, "none")       # 3.10 knows no such setting
    assert {(row.published, row.survived, row.word) for row in survival.rows if not row.durable} == {expected}
    assert [row.survived for row in survival.rows if row.promised] == [1, 1, 1]
    assert survival.verdict == "holds" and str(survival.certain).count(expected[2]) == 4 + 2 * (own.version < "4")


def test_what_cannot_be_measured_is_refused_and_nothing_is_killed(own, own_lab):
    with pika.BlockingConnection(own.address.parameters()) as connection:
        for messages in (0, True, "5", 2.5):
            with pytest.raises(PlanError, match=r"messages is .*\nLikely cause: it must be a positive number"):
                own_lab.survival(messages)
        live = own_lab.start(once_then_ack, own_lab.reminders(1000), publish="while", rate=100)
        with pytest.raises(PlanError, match=r"A run of this lab is under way\.\n.*\nWhat now: Wait for it"):
            own_lab.survival()
        live.end()
        assert connection.channel().is_open
    closed = Lab(broker=own, quiet=True)
    closed.close()
    with pytest.raises(PlanError, match="This lab is closed"):
        closed.survival()


def test_a_shared_broker_is_not_killed(lab):
    with pytest.raises(BrokerError, match=r"(?s)cannot be killed: others may be using it.*private=True"):
        lab.survival()


def _check_that_nothing_is_left(lab, queues):
    run = lab.run(once_then_ack, lab.reminders(5))
    assert (run.verdict, run.counts["once"]) == ("holds", 5)
    with pika.BlockingConnection(lab.broker.address.parameters()) as connection:
        for number in range(1, queues + 1):
            with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="404"):
                connection.channel().queue_declare(topology.survival_queue(lab._prefix, lab._runs - 1, number), passive=True)


def _permit_no_transient_queues_until_it_is_started_again(own):
    """As an administrator does it who follows the advice of RabbitMQ 4."""
    config = own._node._home / "node" / "advanced.config"
    text = config.read_text()
    own.kill()
    config.write_text(text.replace("[{rabbit,[", "[{rabbit,[{permit_deprecated_features,#{transient_nonexcl_queues => false}},", 1))
    own.start()
    config.write_text(text)
