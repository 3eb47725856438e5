"""A node of one's own may be killed, frozen and started again; a shared broker may not."""
import os
import time

import pika
import pytest
from pika.adapters.utils.connection_workflow import AMQPConnectorStackTimeout

from labkit.broker import find
from labkit.errors import BrokerError
from tests.broker.holder import processes_of, survivors


@pytest.fixture(scope="module")
def own(server, tmp_path_factory):
    """A node of its own, whose user has no HOME, with a setting."""
    state = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_STATE", str(state))
        patch.delenv("HOME", raising=False)
        patch.setenv("LABKIT_AMQP_URL", "amqp://somebody:else@127.0.0.1:1")
        own = find(private=True, settings={"consumer_timeout": 3000, "channel_tick_interval": 1000}, server=server)
    family = processes_of(state)
    yield own
    own.release()
    assert survivors(family) == []
    assert list((state / "nodes").iterdir()) == []


def connect(broker, **overrides):
    return pika.BlockingConnection(broker.address.parameters(**overrides))


def test_a_node_of_ones_own_says_so(own):
    assert own.may_kill and own.origin == "private"
    assert "a private node of its own" in str(own)


def test_a_killed_node_starts_again_on_the_same_port_with_its_queues(own):
    with connect(own) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("letters", durable=True, arguments={"x-queue-type": "quorum"})
        channel.basic_publish("", "letters", b"dear", pika.BasicProperties(delivery_mode=2))
    own.settle()
    own.kill()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        connect(own)
    own.start()
    with connect(own) as connection:
        channel = connection.channel()
        assert next(body for _, _, body in channel.consume("letters", inactivity_timeout=10)) == b"dear"


def test_starting_a_running_node_changes_nothing(own):
    with connect(own) as connection:
        own.start()
        assert connection.channel().is_open


def test_a_frozen_node_answers_nothing_until_it_is_thawed(own):
    own.freeze()
    with pytest.raises(AMQPConnectorStackTimeout):
        while True:                                   # the signal may take a moment to stop every thread of a busy node
            connect(own, stack_timeout=1, socket_timeout=30)
    own.thaw()
    connect(own).close()


def test_a_blocked_node_takes_no_messages_until_it_is_unblocked(own):
    own.block()
    connection = connect(own, blocked_connection_timeout=0.5)
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("blocked", durable=True)
    channel.basic_publish("", "blocked", b"")         # the first one tells the broker that this connection publishes
    with pytest.raises(pika.exceptions.ConnectionBlockedTimeout):
        channel.basic_publish("", "blocked", b"")
    own.unblock()
    with connect(own) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", "blocked", b"")
        channel.basic_publish("", "blocked", b"")


def test_what_cannot_be_done_to_a_killed_node_says_so(own):
    own.kill()
    with pytest.raises(BrokerError, match=r"did not carry out 'settle'"):
        own.settle()
    own.start()


def test_settings_reach_the_node(own, server):
    with connect(own, heartbeat=0) as connection:
        channel = connection.channel()
        channel.queue_declare("slow", durable=True, arguments={"x-queue-type": "quorum"})
        channel.basic_publish("", "slow", b"")
        begun = time.monotonic()
        try:
            for method, _, _ in channel.consume("slow", inactivity_timeout=20):
                assert method, "neither cancelled nor closed within 20 s"
        except pika.exceptions.ChannelClosedByBroker as error:
            assert error.reply_code == 406
        assert time.monotonic() - begun < 20


def test_a_shared_broker_refuses_what_would_harm_others(broker):
    for what in (broker.kill, broker.start, broker.freeze, broker.thaw, broker.settle, broker.block, broker.unblock):
        with pytest.raises(BrokerError, match=r"(?s)others may be using it.*private=True"):
            what()
    with pika.BlockingConnection(broker.address.parameters()) as connection:
        assert connection.is_open


@pytest.mark.parametrize("settings", [{"consumer_timeout": "3000"}, {"consumer_timeout": None}, {"a}]}]": 1}, {"x": [1]}])
def test_a_setting_that_is_no_number_is_refused(settings):
    with pytest.raises(BrokerError, match="cannot be given to RabbitMQ"):
        find(private=True, settings=settings)


def test_settings_are_refused_for_a_shared_node():
    with pytest.raises(BrokerError, match="this node is shared"):
        find(settings={"consumer_timeout": 3000})


def test_a_forked_child_does_not_give_its_parents_node_back(own):
    child = os.fork()
    if child == 0:
        own.release()
        os._exit(0)
    os.waitpid(child, 0)
    connect(own).close()
    own.kill()
    own.start()
