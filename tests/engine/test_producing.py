"""Producers: what is ordered, what is published, and what a relay makes of the outbox, at every crash point."""
import os
from collections import Counter

import pytest

from labkit import HandlerError, Message, PlanError, Production, Run, crash, fail, hang, lose, publish_outbox, steps, supervisor, topology
from labkit.sender import Sender
from tests.engine.producers import ORDER, commit_first, three_orders, with_outbox


def numbers(run, *names):
    return tuple(run.counts[name] for name in names)


def test_a_producer_without_a_fault_has_its_order_and_its_event(either):
    run = either.produce(commit_first)
    assert (run.verdict, run.why) == ("holds", "every order has its event: 1 of 1 once")
    assert numbers(run, "keys", "orders", "events", "ids", "once") == (1, 1, 1, 1, 1)
    assert [event.effect_key for event in run.published] == [ORDER]
    assert run.facts.printed == "confirmed\n"


def test_a_confirm_that_is_lost_leaves_its_outcome_unknown_and_the_event_at_the_broker(either):
    run = either.produce(commit_first, faults=[lose.confirm()])
    assert (run.facts.fired, run.facts.printed, run.verdict, run.counts["events"]) == ([1], "unknown\n", "holds", 1)
    assert [event.name for event in run.events if event.name == "confirm.dropped"] == ["confirm.dropped"]
    relayed = either.produce(with_outbox, relay=publish_outbox, faults=[lose.confirm()])
    assert (relayed.verdict, relayed.statuses, relayed.counts["ids"]) == ("holds", {ORDER: "repeated"}, 1)


def test_a_message_that_is_lost_on_its_way_leaves_the_same_unknown_outcome_and_nothing_at_the_broker(either):
    run = either.produce(commit_first, faults=[lose.publish()])
    assert (run.facts.fired, run.facts.printed, run.verdict, run.statuses) == ([1], "unknown\n", "broken", {ORDER: "lost"})
    assert [event.detail["relay"] for event in run.events if event.name == "publish.dropped"] == [
        "dropped: basic.publish, channel 1, number 1; connection cut"]
    third = either.produce(three_orders, relay=publish_outbox, faults=[lose.publish(message="message-for-order-3")])
    assert (third.facts.fired, third.verdict, third.counts["once"], third.counts["events"]) == ([1], "holds", 3, 3)


def test_a_lost_confirm_in_a_handler_gives_no_delivery_back(lab):
    def announce(delivery, shop):
        shop.ledger.record_once(delivery.message.effect_key)
        print(shop.publish(Message(f"{delivery.message.effect_key}:sent")))
        delivery.ack()
    run = lab.run(announce, lab.reminders(1), faults=[lose.confirm()])
    assert (run.verdict, run.counts["deliveries"], run.facts.printed) == ("holds", 1, "unknown\n")
    assert [event.message_id for event in run.published] == ["message-for-invoice-1:reminder:sent"]


def test_what_the_broker_says_is_told_apart(lab):
    def ask(shop):
        said = [shop.publish(Message(f"order-{number}")) for number in range(4)]
        print("nacked" in said, shop.publish(Message("a"), to="nowhere"), shop.publish(Message("b"), to="nowhere", mandatory=False))
        shop.publish(Message("c"), to="nowhere", confirm=False)
        print(shop.publish(Message("d"), to="nowhere", confirm=False), shop.confirm(), shop.confirm())
    run = lab.produce(ask, max_length=1)
    assert run.facts.printed == ("True returned confirmed\nsent {'message-for-c': 'returned', 'message-for-d': 'returned'} {}\n")
    assert run.facts.errors == []


def test_what_cannot_be_sent_is_told_as_not_sent(lab):
    nowhere = {"host": "127.0.0.1", "port": 1, "vhost": "/", "username": "u", "password": "p"}
    sender = Sender(lambda: topology.connect(nowhere), steps.Gate(lambda *_: None, None, ()), lambda: None, "events", {})
    assert (sender.publish(Message("order-1")), sender.confirm()) == ("not sent", {"message-for-order-1": "not sent"})


def test_a_batch_is_confirmed_together_and_in_its_order(lab):
    def batch(shop):
        for number in range(300):
            shop.publish(Message(f"order-{number}"), confirm=False)
        print(sorted(set(shop.confirm().values())))
    run = lab.produce(batch)
    assert run.facts.printed == "['confirmed']\n"
    assert [event.effect_key for event in run.published] == [f"order-{number}" for number in range(300)]


def test_relays_beside_their_producers_find_what_comes(either):
    run = either.produce(three_orders, relay=publish_outbox, relays=2, relay_starts="beside", faults=[hang.at("ledger.begin", nth=3, worker="producer", seconds=0.2)])
    assert (run.verdict, run.counts["once"] + run.counts["repeated"], run.facts.fired) == ("holds", 3, [1])
    first = next(event.at_ms for event in run.events if event.name == "publish")
    assert first < next(event.at_ms for event in run.events if event.name == "continued")


def test_what_a_producer_commits_last_is_seen_by_a_relay_that_has_just_looked(either):
    def looks_and_is_frozen(shop):
        found = shop.outbox.waiting()
        shop.status.move("relay", "new", "has looked")
        shop.ledger.find("order-1")
        for event in found:
            shop.publish(event)
            shop.outbox.mark(event)

    def when_the_relay_has_looked(shop):
        while not shop.ledger.execute("SELECT 1 FROM statuses"):
            pass
        with_outbox(shop)
    run = either.produce(when_the_relay_has_looked, relay=looks_and_is_frozen, relay_starts="beside", faults=[hang.at("ledger.find", seconds=0.3)])
    assert (run.verdict, run.statuses, run.facts.fired) == ("holds", {ORDER: "once"}, [1])


def test_an_event_that_nobody_relays_is_pending_and_goes_on_in_a_later_run(either):
    def nothing(shop):
        pass
    left = either.produce(with_outbox)
    assert (left.verdict, left.statuses, left.counts["outbox"]) == ("unknown", {ORDER: "pending"}, 1)
    later = either.produce(nothing, relay=publish_outbox, continue_from=left)
    assert (later.verdict, later.statuses) == ("holds", {ORDER: "once"})


def test_one_event_under_two_ids_is_a_duplicate_that_nobody_can_recognise(lab):
    def twice(shop):
        shop.ledger.record("order-1")
        for number in (1, 2):
            shop.publish(Message("order-1", f"event-{number}"))
    run = lab.produce(twice)
    assert (run.verdict, run.why) == ("broken", "order-1 is there, and its event was published under 2 ids")


def test_an_order_that_two_producers_record_is_a_duplicate(either):
    run = either.produce(with_outbox, relay=publish_outbox, producers=2)
    assert (run.verdict, run.why, run.statuses) == ("broken", "order-1 was recorded 2 times", {ORDER: "duplicated"})


def test_a_relay_with_an_endless_loop_of_its_own_is_told_and_ended(either):
    def for_ever(shop):
        while True:
            publish_outbox(shop)
    run = either.produce(with_outbox, relay=for_ever)
    assert (run.verdict, run.statuses) == ("holds", {ORDER: "once"})
    assert "HandlerError: The outbox was empty at 500 looks" in run.facts.errors[0]


def test_messages_given_to_a_producer_are_refused(lab):
    with pytest.raises(PlanError, match="takes one producer.*\n.*which lab.run takes"):
        lab.produce(commit_first, lab.reminders(1))


def test_a_relay_that_never_marks_is_stopped(lab):
    def forgets(shop):
        for event in shop.outbox.waiting():
            shop.publish(event)
    run = lab.produce(with_outbox, relay=forgets)
    assert run.verdict == "broken" and run.why == "the event of order-1 was published more than 20 times, so the run was stopped"


def test_a_fault_that_did_not_fire_proves_nothing(lab):
    run = lab.produce(commit_first, faults=[crash.after("outbox.add")])
    assert (run.verdict, run.why) == ("unknown", "the planned crash.after('outbox.add') did not fire, so this run proves nothing about it")


def test_an_error_of_a_producer_is_told_with_its_line_and_undoes_what_was_begun(either):
    def fails(shop):
        shop.ledger.execute("BEGIN")
        shop.ledger.record("order-1")
        raise ValueError("no stock")
    run = either.produce(fails)
    assert (run.verdict, run.statuses) == ("holds", {ORDER: "nothing"})
    assert run.facts.errors == ['ValueError: no stock (in fails: `raise ValueError("no stock")`)']
    planned = either.produce(commit_first, faults=[fail("publish", TimeoutError("slow"))])
    assert (planned.verdict, planned.statuses) == ("broken", {ORDER: "lost"})


def test_a_producer_that_does_not_end_is_ended_by_the_deadline_with_its_line(lab):
    def endless(shop):
        while True:
            pass
    run = lab.produce(endless, deadline_s=0.5)
    assert run.verdict == "unknown" and "the deadline of 0.5 s passed while producer 1 was still running, in endless" in run.why


def test_a_saved_production_is_judged_again(lab, tmp_path):
    run = lab.produce(with_outbox, relay=publish_outbox, faults=[crash.after("publish")])
    again = Run.load(run.save(tmp_path / "run"))
    assert isinstance(again, Production)
    assert (again.verdict, again.counts, again.published) == (run.verdict, run.counts, run.published)


def test_a_handler_that_publishes_and_fills_an_outbox_can_be_raced(either):
    def handler(delivery, shop):
        shop.outbox.add(Message("sent"))
        shop.publish(Message("sent"))
        delivery.ack()
    race = either.race(handler, either.reminders(1)[0], limit=2)
    assert "A adds an event · A publishes · A has its confirm" in " · ".join(race.schedules[0].told)


@pytest.mark.parametrize(("arguments", "told"), [
    ({"faults": [crash.after("publish", message=1)]}, "has no position"), ({"faults": [crash.after("publish", worker="relay")]}, "there is none"),
    ({"faults": [crash.after("publish", worker=3)]}, "only 1 are started"), ({"producers": 0}, "producers is 0"), ({"relay_starts": "now"}, "relay_starts is 'now'"),
    ({"faults": [crash.after("publish", worker="producer 2")]}, "only 1 are started"), ({"faults": [crash.after("publish", worker="worker")]}, "there is none"),
    ({"faults": [crash.after("publish", attempt=2)]}, "attempts are those of a delivery"), ({"relays": 2}, "there is none"), ({"workers": 2}, "no argument 'workers'"),
    ({"max_length": -1}, "max_length is -1"), ({"relais": 2}, "perhaps 'relays'")])
def test_a_production_that_cannot_be_carried_out_is_refused(lab, arguments, told):
    with pytest.raises(PlanError, match=told):
        lab.produce(commit_first, **arguments)


def test_a_function_that_is_no_producer_is_refused(lab):
    with pytest.raises(HandlerError, match=r"The producer 'handler' cannot be called with \(shop\)"):
        def handler(delivery, shop):
            pass
        lab.sweep(handler)
    with pytest.raises(PlanError, match="'worker' is|worker is 'boss'"):
        crash.after("publish", worker="boss")


@pytest.mark.parametrize(("act", "told"), [
    (lambda shop: shop.publish("order-1"), "shop.publish was given 'order-1'"), (lambda shop: shop.outbox.add("order-1"), "shop.outbox.add was given 'order-1'"),
    (lambda shop: shop.publish(Message("order-1"), to=5), "The queue's name is 5"),
    (lambda shop: [shop.outbox.add(Message("order-1", payload={"state": state})) for state in ("placed", "cancelled")],
     "The outbox holds another event with the id 'message-for-order-1'")])
def test_what_cannot_be_published_is_told(either, act, told):
    run = either.produce(act)
    assert told in run.facts.errors[0]


def test_the_same_event_added_again_is_a_duplicate(either):
    def again(shop):
        print([shop.outbox.add(Message("order-1")) for _ in range(2)])
    assert either.produce(again).facts.printed == "['added', 'duplicate']\n"


def test_what_cannot_be_sent_leaves_the_outcomes_of_the_others_true(lab):
    def some_wrong(shop):
        wrong = Message("wrong", payload={"state": "placed"})
        wrong.payload["state"] = object()
        for act in (lambda: shop.publish(wrong), lambda: shop.publish(Message("a"), to="q" * 256)):
            try:
                act()
            except (TypeError, HandlerError) as error:
                print(error)
        print(shop.publish(Message("b"), to="nowhere"), shop.publish(Message("c")))
    run = lab.produce(some_wrong)
    assert run.facts.printed.startswith("Object of type object is not JSON serializable\nThe queue's name is longer than 255 bytes.")
    assert run.facts.printed.endswith("\nreturned confirmed\n")


def test_a_message_that_is_published_again_is_not_told_what_became_of_it_before(lab):
    def again(shop):
        print(shop.publish(Message("order-1"), to="nowhere"), shop.publish(Message("order-1")))
    run = lab.produce(again, faults=[lose.confirm()])
    assert (run.facts.printed, run.counts["events"]) == ("unknown confirmed\n", 1)


def test_a_confirm_of_one_message_keeps_what_is_still_to_be_told_of_others(lab):
    def mixed(shop):
        shop.publish(Message("a"), to="nowhere", confirm=False)
        print(shop.publish(Message("b")), shop.confirm(), shop.confirm())
    assert lab.produce(mixed).facts.printed == "confirmed {'message-for-a': 'returned'} {}\n"


def test_a_run_that_goes_on_judges_what_it_did_itself(either):
    def find_and_order(shop):
        shop.ledger.find("order-1")
        with shop.ledger.transaction():
            shop.ledger.record("order-2")
            shop.outbox.add(Message("order-2"))
    before = either.produce(with_outbox, relay=publish_outbox)
    after = either.produce(find_and_order, relay=publish_outbox, continue_from=before)
    assert (after.verdict, after.statuses, *numbers(after, "keys", "orders")) == ("holds", {"order-2": "once"}, 1, 1)

    def ship_once(delivery, shop):
        shop.ledger.record_once(f"{delivery.message.effect_key}:shipped")
        delivery.ack()
    consumed = either.run(ship_once, before.published)
    assert either.produce(with_outbox, relay=publish_outbox, continue_from=consumed).statuses == {ORDER: "once"}


def test_so_many_events_that_counting_them_takes_long_are_counted(lab, monkeypatch):
    def batch(shop):
        for number in range(2000):
            shop.publish(Message(f"order-{number}"), confirm=False)
        shop.confirm()
    monkeypatch.setattr(supervisor, "_FAREWELL_S", 0.2)
    assert lab.produce(batch).counts["events"] == 2000


def test_what_is_lost_in_a_batch_is_that_message_alone(lab):
    def batch(shop):
        for number in range(10):
            shop.ledger.record(f"order-{number}")
            shop.publish(Message(f"order-{number}"), confirm=False)
        print(Counter(shop.confirm().values()))
    for fault, events in ((lose.confirm(message="message-for-order-5"), 10), (lose.publish(message="message-for-order-5"), 9)):
        run = lab.produce(batch, faults=[fault])
        assert (run.facts.fired, run.facts.printed, run.counts["once"]) == ([1], "Counter({'confirmed': 9, 'unknown': 1})\n", events)


def test_two_producers_lose_each_its_own(lab):
    def many(shop):
        for number in range(20):
            shop.publish(Message(f"order-{os.getpid()}-{number}"))
    for kind, what in ((lose.confirm, "confirm"), (lose.publish, "publish")):
        run = lab.produce(many, producers=2, faults=[kind(worker="producer 1"), kind(worker="producer 2")])
        dropped = {event.effect_key for event in run.events if event.name == f"{what}.dropped"}
        unknown = {event.effect_key for event in run.events if event.detail.get("outcome") == "unknown"}
        assert (run.facts.fired, len(dropped)) == ([1, 1], 2) and dropped == unknown


def test_a_child_that_a_producer_or_a_relay_forks_comes_back_as_nobody(either):
    def forks(shop):
        shop.publish(Message("order-1"))
        with shop.ledger.transaction():
            shop.ledger.record("order-1")
            child = os.fork()
            if child == 0:
                raise ValueError("in the child")
            os.waitpid(child, 0)
    run = either.produce(forks)
    assert (run.verdict, run.statuses, run.facts.printed, run.facts.errors) == ("holds", {ORDER: "once"}, "", [])


@pytest.mark.parametrize("body", [b"\xff", b"{}", b'{"effect_key": "%s"}' % (b"x" * 256), b'{"effect_key": "order-1", "payload": {"sum": NaN}}'])
def test_what_is_no_message_is_an_unreadable_stray(lab, tmp_path, body):
    address = topology.wire(lab.broker.address)

    def foreign(shop):
        shop.publish(Message("order-0"))
        with topology.connect(address) as connection:
            connection.channel().basic_publish("", shop._sender._queue, body)
    run = lab.produce(foreign)
    assert run.statuses == {"order-0": "stray", "(unreadable)": "stray"} == Run.load(run.save(tmp_path / "run")).statuses


def test_what_was_sent_before_a_producer_ends_itself_is_there(lab):
    def leaves(shop):
        for number in range(100):
            shop.publish(Message(f"order-{number}"), confirm=False)
        raise SystemExit
    run = lab.produce(leaves)
    assert (run.counts["events"], run.facts.errors) == (100, ["SystemExit:  (in leaves: `raise SystemExit`)", "producer 1 ended by itself, with status 0"])


def test_a_relay_that_raises_once_is_called_again(either):
    for step in ("ledger.begin", "outbox.read", "publish", "outbox.mark", "ledger.commit"):
        run = either.produce(three_orders, relay=publish_outbox, faults=[fail(step, TimeoutError("slow"), worker="relay")])
        assert (run.verdict, run.counts["orders"], run.counts["ids"], len(run.facts.errors)) == ("holds", 3, 3, 1), step

    def raises(shop):
        raise ValueError("no relay")
    assert either.produce(with_outbox, relay=raises).facts.errors[0].endswith("— 2 times")


def test_an_event_that_the_broker_refuses_for_ever_is_not_told_as_published(lab):
    run = lab.produce(three_orders, relay=publish_outbox, max_length=1)
    assert (run.verdict, run.counts["pending"] + run.counts["once"], run.counts["pending"] > 0) == ("unknown", 3, True)
    assert run.why.endswith("was sent more than 20 times and never taken, so the run was stopped")


def test_producers_that_end_themselves_are_not_given_up(lab):
    def leaves(shop):
        with shop.ledger.transaction():
            shop.ledger.record(f"order-{os.getpid()}")
            shop.outbox.add(Message(f"order-{os.getpid()}"))
        raise SystemExit
    run = lab.produce(leaves, relay=publish_outbox, producers=8)
    assert (run.verdict, run.counts["once"]) == ("holds", 8)


def test_the_line_of_a_relay_is_told_and_nothing_else_is_printed(lab):
    def endless(shop):
        publish_outbox(shop)
        while True:
            pass
    run = lab.produce(with_outbox, relay=endless, deadline_s=0.5)
    assert "while relay 1 was still running, in endless" in run.why and run.facts.printed == ""
