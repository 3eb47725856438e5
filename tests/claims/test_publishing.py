"""The claims of chapter 4: publishing. The same experiments as in the notebook, on every broker under test."""
import itertools

import pika
import pytest

from labkit import BrokerError, Lab, PlanError, topology
from tests.engine.handlers import once_then_ack

MESSAGES = 200


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
