"""The check of a topology: what it refuses loses a message on a real broker without a word, and what it passes keeps it."""
import time
import uuid
from collections import Counter

import pika
import pytest

from labkit import PlanError, check_topology, topology

TTL, TO_END = {"x-message-ttl": 20}, {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "end"}
TO_A, TO_B, QUORUM = {**TO_END, "x-dead-letter-routing-key": "a"}, {**TO_END, "x-dead-letter-routing-key": "b"}, {"x-queue-type": "quorum"}
ALWAYS = {"x-dead-letter-strategy": "at-least-once"}
NO_DROP = {"x-overflow": "reject-publish"}
#: what is wrong -> (queues that lose one of two messages or both, queues that lose none, what the check says)
BY_THEMSELVES = {
    "expires into nothing": ({"a": TTL}, {"a": {**TTL, **TO_END}, "end": {}}, "lets messages expire, and has no dead-letter exchange"),
    "drops at its limit": ({"a": {"x-max-length": 1}}, {"a": {"x-max-length": 1, **TO_END}, "end": {}}, "drops the oldest when it is full, and has no dead-letter"),
    "no such target": ({"a": {**TTL, **TO_END}}, {"a": {**TTL, **TO_END}, "end": {}}, "go to 'end', and there is no such queue"),
    "back to itself": ({"a": {**TTL, **TO_A}}, {"a": {**TTL, **TO_END}, "end": {}}, "without ever being rejected, and RabbitMQ then drops it: 'a' → 'a'"),
    "back to itself by the key that it has": ({"a": {**TTL, "x-dead-letter-exchange": ""}}, {"a": {**TTL, **TO_END}, "end": {}}, "'a' → 'a'"),
    "round by expiry": ({"a": {**TTL, **TO_B}, "b": {**TTL, **TO_A}}, {"a": {**TTL, **TO_B}, "b": TO_A}, "'a' → 'b' → 'a'"),
    "round by a limit": ({"a": {**TTL, **TO_B}, "b": {"x-max-length": 0, **TO_A}}, {"a": {**TTL, **TO_B}, "b": {"x-max-length": 2, **TO_A, **NO_DROP}}, "'a' → 'b' → 'a'"),
}
by_themselves = pytest.mark.parametrize(("wrong", "mended", "told"), BY_THEMSELVES.values(), ids=BY_THEMSELVES)


class Queues:
    """Some queues on a broker, by their short names."""

    def __init__(self, connection):
        self.channel, self._prefix, self.names = connection.channel(), f"labkit.{uuid.uuid4().hex[:8]}.own.", {}
        self.channel.confirm_delivery()

    def declare(self, queues):
        for name, arguments in queues.items():
            self.names[name] = self._prefix + name
            key = arguments.get("x-dead-letter-routing-key")
            self.channel.queue_declare(self.names[name], durable=True, arguments={
                **arguments, "x-expires": 600_000, **({"x-dead-letter-routing-key": self._prefix + key} if key else {})})

    def publish(self, name, body):
        self.channel.basic_publish("", self.names[name], body, pika.BasicProperties(delivery_mode=2), mandatory=True)

    def ready(self, *names):
        return sum(self.channel.queue_declare(self.names[name], passive=True).method.message_count for name in names or self.names)

    def wait(self, condition, seconds=20):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, {name: self.ready(name) for name in self.names}
            self.channel.connection.process_data_events(time_limit=0.01)

    def at_rest(self, quiet_s=0.5):
        """Returns how many messages the queues hold together, once that has not changed for a while."""
        seen, since = self.ready(), time.monotonic()
        while time.monotonic() < since + quiet_s:
            self.channel.connection.process_data_events(time_limit=0.01)
            if (now := self.ready()) != seen:
                seen, since = now, time.monotonic()
        return seen

    def take(self, name):
        """Takes one message, and returns (body, delivery tag)."""
        for method, _, body in self.channel.consume(self.names[name], inactivity_timeout=20):
            assert method, f"nothing came from {name}"
            return body, method.delivery_tag

    def remove(self):
        for name in self.names.values():
            self.channel.queue_delete(name)


@pytest.fixture
def queues(own):
    with pika.BlockingConnection(own.address.parameters()) as connection:
        queues = Queues(connection)
        yield queues
        queues.remove()


@by_themselves
def test_what_is_refused_loses_messages_without_a_word(queues, wrong, mended, told):
    with pytest.raises(PlanError, match=told):
        check_topology(wrong)
    queues.declare(wrong)
    for body in (b"1", b"2"):
        queues.publish("a", body)                                             # confirmed, persistent and mandatory
    queues.wait(lambda: queues.ready() < 2)
    assert queues.at_rest() < 2


@by_themselves
def test_what_is_mended_passes_and_keeps_them(queues, wrong, mended, told):
    check_topology(mended)
    queues.declare(mended)
    for body in (b"1", b"2"):
        queues.publish("a", body)
    last = list(mended)[-1]
    queues.wait(lambda: queues.ready(last) == 2 - ("x-max-length" in mended["a"]))
    assert queues.at_rest() == 2


@pytest.mark.parametrize("refuse_for_good", [True, False], ids=["rejected", "delivered too often"])
def test_a_round_by_a_delivery_limit_loses_the_message_and_one_by_a_rejection_keeps_it(queues, refuse_for_good):
    work = {**QUORUM, "x-delivery-limit": 1, **TO_B}
    with pytest.raises(PlanError, match="without ever being rejected, and RabbitMQ then drops it: 'work' → 'b' → 'work'(.|\n)*'work' gives up what was delivered too often"):
        check_topology({"work": work, "b": {**TTL, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"}})
    queues.declare({"work": work, "b": {**TTL, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work"}})
    queues.publish("work", b"1")
    for _ in range(1 if refuse_for_good else 2):
        body, tag = queues.take("work")
        assert body == b"1"
        queues.channel.basic_reject(tag, requeue=not refuse_for_good)
    queues.channel.cancel()
    queues.publish("b", b"2")
    queues.wait(lambda: queues.ready("work") == 1 + refuse_for_good)
    assert queues.at_rest() == 1 + refuse_for_good


@pytest.mark.parametrize(("extra", "kept"), [(ALWAYS | NO_DROP, True), (ALWAYS, False), (NO_DROP, False)], ids=["both", "without reject-publish", "without at-least-once"])
def test_at_least_once_keeps_what_has_no_target_yet_and_half_of_it_keeps_nothing(queues, extra, kept):
    delay = {**QUORUM, **TTL, **TO_END, **extra}
    if extra == ALWAYS:
        with pytest.raises(PlanError, match="does not dead-letter at least once, although it says so(.|\n)*needs reject-publish"):
            check_topology({"a": delay, "end": QUORUM})
    else:
        check_topology({"a": delay, "end": QUORUM})
    queues.declare({"a": delay})
    queues.publish("a", b"1")
    queues.wait(lambda: queues.ready("a") == 0)
    queues.declare({"end": QUORUM})
    queues.publish("a", b"2")
    found = Counter()
    while not found[b"2"] or kept and not found[b"1"]:
        found[queues.take("end")[0]] += 1
    assert set(found) == ({b"1", b"2"} if kept else {b"2"})


def test_at_least_once_on_a_classic_queue_is_refused_by_the_check_and_by_the_broker(queues):
    arguments = {"x-queue-type": "classic", **TTL, **TO_END, **ALWAYS, **NO_DROP}
    with pytest.raises(PlanError, match="only quorum queues know it"):
        check_topology({"a": arguments, "end": {}})
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="406.*x-dead-letter-strategy"):
        queues.declare({"a": arguments})
    queues.names.clear()


@pytest.mark.parametrize(("queues_", "told"), [
    ({"a": {**ALWAYS, **NO_DROP, **TTL, **TO_END}, "end": {}}, "only quorum queues know it"), ({"a": {**QUORUM, **ALWAYS, **NO_DROP}}, "it has no dead-letter exchange"),
    ({"a": {"x-max-length-bytes": 9}}, "drops the oldest"), ({"a": {"x-dead-letter-exchange": "mine", **TTL}}, "exchange 'mine', which this check cannot follow"),
    ({"a": {**TTL, **TO_B}, "b": {**TTL, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "c"}, "c": {**TTL, **TO_B}}, "'b' → 'c' → 'b'")])
def test_each_refusal_tells_the_place_the_reason_and_what_to_do(queues_, told):
    with pytest.raises(PlanError, match=told) as caught:
        check_topology(queues_)
    assert caught.value.why and caught.value.now.endswith(".")


def test_labkits_own_declarations_pass():
    for queue_type in ("quorum", "classic"):
        for delay_ms in (None, 100):
            check_topology({"work": topology.work_arguments(queue_type, "dead", None), "dead": topology.dead_arguments(), "events": topology.events_arguments(5),
                            "survival": topology.survival_arguments(queue_type), "expired": topology.expired_arguments(),
                            "delay": topology.delay_arguments("work", delay_ms, queue_type, queue_type == "quorum")})
    check_topology({})
    check_topology({"a": None})                                               # as pika takes it
