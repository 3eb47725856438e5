"""The job of a consumer: takes deliveries from the work queue, enters the handler with each, and sees to those that it raised for."""

import collections
from typing import Any

from labkit import steps
from labkit.delivery import Delivery
from labkit.errors import LedgerError
from labkit.message import Message, Unreadable
from labkit.retry import BUSINESS, LONGEST_MS, UNKNOWN, RetryPolicy
from labkit.routes import Routes


class Consumer:
    """One job of a worker. `go_on` consumes until it is to stop, or the channel or the connection is lost."""

    def __init__(self, worker: Any, job: dict[str, Any], policy: RetryPolicy | None):
        self._worker, self._job, self._policy = worker, job, policy
        self._routes = Routes(policy, worker.shop, worker.sender, self._delay_queue)
        self._delay_queues: dict[int, str] = {}
        self._inbox: collections.deque = collections.deque()
        self._count = 0
        self._left_open = False

    @property
    def left_nothing(self) -> bool:
        """Tells whether no delivery is open."""
        return not self._left_open and not self._inbox

    def go_on(self) -> None:
        """Subscribes, and handles what comes. Raises pika's errors when the line is lost."""
        self._subscribe()
        worker, channel = self._worker, self._worker.channel
        while len(self._inbox) < self._job["fill"] and not worker.ear.stopping:
            worker.wait()
        self._job["fill"] = 0
        while not worker.ear.stopping and channel.is_open and channel.consumer_tags:
            if not self._inbox:
                worker.wait(0)
            if self._inbox:
                self._handle(*self._inbox.popleft())
            elif not worker.ear.stopping:             # asked again: what would wake the next call may be used up
                worker.ear.tell(t="idle", handled=self._count)
                worker.wait()
        if channel.is_open and not worker.ear.stopping:
            channel.close()                           # cancelled by the broker: what it holds goes back to the queue

    def _subscribe(self) -> None:
        worker = self._worker
        if not worker.channel.is_open:
            worker.open_channel()
        self._inbox.clear()
        automatic = self._job["automatic"]
        worker.channel.add_on_cancel_callback(lambda _: worker.gate.note("cancelled", None))
        if not automatic:
            worker.channel.basic_qos(prefetch_count=self._job["prefetch"])
        worker.channel.basic_consume(self._job["queue"], lambda *delivery: self._inbox.append(delivery), auto_ack=automatic)
        worker.gate.note("started", None)

    def _handle(self, channel, method, properties, body: bytes) -> None:
        self._count += 1
        worker = self._worker
        try:
            message, unreadable = Message.from_wire(body, properties.message_id, properties.correlation_id), None
        except Unreadable as error:
            message, unreadable = Message.unreadable(body, properties.message_id), error
        delivery = worker.current = Delivery(self._count, message, method.delivery_tag, method.redelivered, channel, worker.gate,
                                             settled=self._job["automatic"], body=body, headers=properties.headers or {}, routes=self._routes)
        try:
            with worker.gate.step(steps.RECEIVE, delivery, message_id=message.message_id, effect_key=message.effect_key, position=delivery.position,
                                  tag=delivery.tag, redelivered=delivery.redelivered, **{"copy": delivery.copy} if delivery.copy else {}) as passage:
                delivery.attempt = passage.outcome = worker.shop.ledger.log_delivery(message.message_id, message.effect_key, self._job["worker"])
            if delivery.attempt > self._job["max_deliveries"]:
                worker.ear.tell(t="idle", handled=self._count)    # the supervisor ends the run at what it reads in the trace
                while not worker.ear.stopping:
                    worker.wait()
                return
            if delivery.attempt > 1 and worker.shop.terminal.holds(message):
                worker.gate.note("parked already", delivery)
                delivery.ack()
                worker.gate.note("returned", delivery)
                return
            if unreadable:
                raise unreadable
            worker.enter(delivery, worker.shop)
            worker.leave_nothing_open()
            worker.gate.note("returned", delivery)
        except BaseException as error:
            self._see_to(delivery, error)
        finally:
            worker.current = None
            self._left_open |= not delivery.settled

    def _see_to(self, delivery: Delivery, error: BaseException) -> None:
        """Sees to a delivery whose handler raised: as the policy says, or to the dead-letter queue."""
        policy, kind = self._policy, self._kind_of(error)
        self._worker.fail(error, **{"kind": kind} if kind else {})
        if delivery.settled or not delivery.channel.is_open:
            return
        if policy is None or delivery.attempt is None:
            # without the ledger nothing is known of this message, so it goes back, as often as its queue allows
            delivery.reject(requeue=delivery.attempt is None and isinstance(error, LedgerError))
            return
        try:
            self._routes.follow(delivery, kind, str(error) if kind == BUSINESS else type(error).__name__, _retry_after_ms(error))
        except Exception as trouble:                  # the record was not written, or a planned fault: no ack, and it comes again
            self._worker.fail(trouble)
            if not delivery.settled and delivery.channel.is_open:
                delivery.nack(requeue=True)

    def _delay_queue(self, delay_ms: int) -> str:
        """Returns the queue for this delay, which the lab declares for all its workers."""
        if delay_ms not in self._delay_queues:
            self._worker.ear.tell(t="delay", delay_ms=delay_ms)
            self._delay_queues[delay_ms] = self._worker.ear.answers.get()[0]["queue"]
        return self._delay_queues[delay_ms]

    def _kind_of(self, error: BaseException) -> str | None:
        """Returns the kind of a failure by the policy; unknown where the policy's own function fails."""
        if self._policy is None:
            return None
        try:
            return self._policy.classify(error)
        except Exception as trouble:
            self._worker.fail(trouble)
            return UNKNOWN


def _retry_after_ms(error: BaseException) -> int:
    """Returns what a service asked for with its Retry-After in seconds; 0 where it asked for nothing, or for a date."""
    asked = getattr(getattr(error, "headers", None), "get", lambda _: None)("Retry-After")
    return int(1000 * min(float(str(asked)), LONGEST_MS)) if str(asked).isdecimal() else 0
