"""A broker that stops answering, before a run and in the middle of one: the run ends by its deadline and says why."""
import time

import pytest

from labkit import BrokerError, Lab, Message, crash
from tests.engine import handlers
from tests.engine.test_live import until

DEADLINE_S = 1        #: of a run that cannot begin
LONGER_S = 4          #: of a run that is hurt in its middle, which it must reach on a busy machine
FAREWELL_S = 12       #: what the end of a run may take beyond its deadline, on a busy machine
HURT = {"blocked": lambda own: own.block(), "frozen": lambda own: own.freeze(), "gone": lambda own: own.kill()}
HEAL = {"blocked": lambda own: own.unblock(), "frozen": lambda own: own.thaw(), "gone": lambda own: own.start()}

queue_types = pytest.mark.parametrize("queue_type", ["quorum", "classic"])


@pytest.fixture(params=HURT)
def trouble(request, own, own_lab):
    """One kind of trouble, not begun. After it the broker is well again, and so must be the lab that lived through it."""
    yield request.param
    HEAL[request.param](own)
    run = own_lab.run(handlers.once_then_ack, own_lab.reminders(5))
    assert (run.verdict, run.counts["once"]) == ("holds", 5)


@queue_types
def test_a_run_that_cannot_begin_ends_by_its_deadline_and_says_why(own, own_lab, trouble, queue_type):
    HURT[trouble](own)
    begun = time.monotonic()
    with pytest.raises(BrokerError) as caught:
        own_lab.run(handlers.once_then_ack, own_lab.reminders(5), queue_type=queue_type, deadline_s=DEADLINE_S)
    assert time.monotonic() - begun < DEADLINE_S + FAREWELL_S
    told = {"blocked": ["Likely cause: it has blocked publishers: low on memory\nWhat now: Free memory"],
            "frozen": ["within 1 s.\nLikely cause: it is frozen, or overloaded\nWhat now: Run `python3 -m labkit doctor`"],
            "gone": ["Nobody listens at 127.0.0.1:", "The connection to RabbitMQ ended."]}[trouble]      # heard of it before, or only now
    assert any(words in str(caught.value) for words in told)


@queue_types
def test_a_run_that_loses_its_broker_ends_by_its_deadline_as_unknown_and_says_why(own, own_lab, trouble, queue_type):
    live = own_lab.start(handlers.once_then_ack, own_lab.reminders(10_000), publish="while", rate=500, queue_type=queue_type, deadline_s=LONGER_S)
    until(lambda: live.counts["effects"] >= 5)
    begun = time.monotonic()
    HURT[trouble](own)
    run = live.wait()
    assert time.monotonic() - begun < LONGER_S + FAREWELL_S
    assert run.verdict == "unknown" and run.counts["effects"] >= 5
    assert {"blocked": "the deadline of 4 s passed while RabbitMQ took no messages: low on memory",
            "frozen": "the deadline of 4 s passed, and then the broker did not answer any more",
            "gone": "the connection to the broker ended"}[trouble] in run.why


def test_a_lab_on_a_broker_that_does_not_answer_is_refused(own, monkeypatch):
    monkeypatch.setattr("labkit.lab.ANSWER_S", 1)
    own.freeze()
    try:
        with pytest.raises(BrokerError, match=r"did not answer within 1 s"):
            Lab(broker=own, quiet=True)
    finally:
        own.thaw()


def order(shop):
    shop.ledger.record("order-1")
    print(shop.publish(Message("order-1")))


def test_a_producer_is_told_that_the_broker_takes_no_messages_and_its_event_is_taken_when_it_does_again(own, own_lab):
    own.block()
    try:
        run = own_lab.produce(order, deadline_s=DEADLINE_S)
        assert (run.facts.printed, run.verdict, run.statuses) == ("blocked\n", "unknown", {"order-1": "unknown"})
    finally:
        own.unblock()
    assert own_lab.produce(order).verdict == "holds"


def test_what_a_blocked_broker_has_of_a_batch_or_of_a_producer_at_its_deadline_is_not_told_as_lost(own, own_lab):
    def batch(shop):
        for number in (1, 2):
            shop.ledger.record(f"order-{number}")
            shop.publish(Message(f"order-{number}"), confirm=False)
        print(shop.confirm())
    own.block()
    try:
        blocked = own_lab.produce(batch)
        hurt = own_lab.produce(batch, faults=[crash.after("publish")], deadline_s=DEADLINE_S)
    finally:
        own.unblock()
    assert blocked.facts.printed == "{'message-for-order-1': 'blocked', 'message-for-order-2': 'blocked'}\n"
    assert [(run.verdict, run.counts["lost"], run.counts["unknown"] > 0) for run in (blocked, hurt)] == [("unknown", 0, True)] * 2
