"""The claims of chapter 5: retries. The same experiments as in the notebook, on every broker under test."""
import time

import pika
import pytest

from labkit import BrokerError, Lab, PlanError, topology
from labkit.broker import find
from tests.claims.counting import numbers
from tests.engine.handlers import nack_always, once_then_ack

SLOW_FIRST = [(1500, "slow"), (100, "fast")]
EXPERIMENTS = 8                                       # of which one at least must lose something; about every one does


def reject_always(delivery, shop):
    delivery.reject(requeue=True)


def newer(lab):
    """Tells whether the broker is one of those that count failed deliveries only."""
    return tuple(map(int, lab.broker.version.split(".")[:2])) >= (4, 3)


@pytest.mark.claim("R6")
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_in_one_queue_a_short_delay_waits_behind_a_long_one_and_in_a_queue_of_its_own_it_does_not(lab, queue_type):
    blocked = lab.measure_delays(SLOW_FIRST, "one queue", queue_type)
    assert list(blocked) == ["slow", "fast"] and blocked["slow"] >= 1500 and blocked["fast"] > 1000
    free = lab.measure_delays(SLOW_FIRST, "one queue per delay", queue_type)
    assert list(free) == ["fast", "slow"] and 100 <= free["fast"] < 1500 <= free["slow"]


def test_no_delay_is_early(lab):
    for queue_type in ("quorum", "classic"):
        for arrangement in ("one queue per delay", "one queue"):
            came = lab.measure_delays([(delay_ms, f"{delay_ms} {number}") for delay_ms in (20, 50, 110) for number in range(10)], arrangement, queue_type)
            assert len(came) == 30 and all(ms >= int(name.split()[0]) - 1 for name, ms in came.items())   # RabbitMQ counts whole ms


def test_what_cannot_be_measured_is_refused(lab):
    for plan, told in ((5, "plan is 5"), ([], "plan is empty"), ([(0, "a")], "plan holds"), ([("a", 5)], "plan holds"), ([(5, "a"), (6, "a")], "twice"), ([5], "plan holds 5")):
        with pytest.raises(PlanError, match=told):
            lab.measure_delays(plan)
    with pytest.raises(PlanError, match="arrangement is 'two queues'"):
        lab.measure_delays(SLOW_FIRST, "two queues")


@pytest.mark.claim("R4")
def test_a_delivery_that_waits_in_the_consumer_holds_its_prefetch_slot_and_the_next_one_waits_too(lab, broker):
    queue, got = lab.queue("sleeper"), []
    with pika.BlockingConnection(broker.address.parameters()) as connection:
        channel = connection.channel()
        try:
            channel.queue_declare(queue, durable=True, arguments=topology.work_arguments("quorum", None, None))
            channel.confirm_delivery()
            for body in (b"fails for now", b"could be done at once"):
                channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2), mandatory=True)
            channel.basic_qos(prefetch_count=1)
            channel.basic_consume(queue, lambda *delivery: got.append(delivery))
            _until(lambda: got, connection)
            connection.sleep(0.3)                     # as a consumer does that waits before it tries again, heartbeats and all
            assert [body for *_, body in got] == [b"fails for now"]
            channel.basic_ack(got[0][1].delivery_tag)
            _until(lambda: len(got) == 2, connection)
            assert got[1][3] == b"could be done at once"
        finally:
            channel.queue_delete(queue)


@pytest.fixture(scope="module")
def impatient(server):
    """A lab on a node of its own that waits 0.3 s for an ack."""
    with find(private=True, settings={"consumer_timeout": 300, "channel_tick_interval": 100}, server=server) as broker:
        with Lab(broker=broker, quiet=True) as lab:
            yield lab


@pytest.mark.claim("R4")
def test_a_consumer_that_sleeps_past_the_acknowledgement_timeout_loses_its_delivery_and_the_effect_happens_twice(impatient):
    def sleep_before_the_next_try(delivery, shop):
        if delivery.attempt == 1:
            time.sleep(1.5)                           # the back-off that is to be shown, not a way of waiting for something
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    run = impatient.run(sleep_before_the_next_try, impatient.reminders(1))
    assert (run.verdict, *numbers(run, "published", "deliveries", "effects", "duplicated")) == ("broken", 1, 2, 2, 1)
    told = [(event.name, event.detail.get("code")) for event in run.events if event.name in ("channel.closed", "cancelled")]
    assert told == [("cancelled", None) if newer(impatient) else ("channel.closed", 406)]


def test_a_delivery_limit_bounds_what_is_rejected_on_every_version_and_what_is_nacked_only_before_4_3(lab):
    def bounded(handler):
        run = lab.run(handler, lab.reminders(1), delivery_limit=2, max_deliveries=10)
        return run.verdict, *numbers(run, "deliveries", "dead_lettered")
    assert bounded(reject_always) == ("holds", 3, 1)
    assert bounded(nack_always) == (("broken", 11, 0) if newer(lab) else ("holds", 3, 1))


@pytest.mark.claim("R16")
def test_a_killed_broker_loses_what_expires_with_ordinary_dead_lettering_and_nothing_with_at_least_once(own_lab):
    ordinary = 0
    for _ in range(EXPERIMENTS):
        expiry = own_lab.expiry()
        classic, quorum, always = expiry.rows
        assert [(row.queue, row.strategy, row.published) for row in expiry.rows] == [
            ("classic", "at-most-once", 8000), ("quorum", "at-most-once", 8000), ("quorum", "at-least-once", 8000)]
        assert (always.lost, expiry.promised) == (0, always)
        ordinary += (classic.lost + quorum.lost) * (classic.hit or quorum.hit)
        if ordinary and expiry.verdict == "holds":
            break
    assert ordinary and expiry.verdict == "holds"
    assert str(expiry).startswith("holds: at-least-once dead-lettering lost 0 of 8,000 messages\nthe broker's process was killed while the delay queues expired")
    _check_that_nothing_is_left(own_lab)


def test_a_kill_that_missed_the_expiry_proves_nothing(own_lab):
    expiry = own_lab.expiry(messages=1)               # one message has arrived or not; it never has in part
    assert (expiry.verdict, [row.lost for row in expiry.rows if row.strategy == "at-least-once"]) == ("unknown", [0])
    assert "so nothing is proven" in expiry.why and {row.kill for row in expiry.rows} <= {"too early", "too late"}


def test_a_shared_broker_is_not_killed(lab):
    with pytest.raises(BrokerError, match=r"(?s)cannot be killed: others may be using it.*private=True"):
        lab.expiry()
    with pytest.raises(PlanError, match="messages is 0"):
        lab.expiry(0)


def _until(condition, connection, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        connection.process_data_events(time_limit=deadline - time.monotonic())


def _check_that_nothing_is_left(lab):
    assert lab.run(once_then_ack, lab.reminders(5)).verdict == "holds"
    with pika.BlockingConnection(lab.broker.address.parameters()) as connection:
        for number in range(1, 13):
            for name in (topology.expiry_queue, topology.expired_queue):
                with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="404"):
                    connection.channel().queue_declare(name(lab._prefix, lab._runs - 1, number), passive=True)
