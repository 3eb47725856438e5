"""The worker process: connects, waits for a run's job, and calls what it was given; killed in the middle of any of it.

A job is to consume from a queue, with a handler, or to produce: to call a producer once, or a relay until nothing is left for it.

Forked from the fork server. One thread does the work; a second one hears the supervisor.
"""

import collections
import faulthandler
import gc
import itertools
import os
import pickle
import signal
import socket
import sys
from typing import Any

import cloudpickle  # noqa: F401  (the fork server loads it once for all workers; pickle needs it to load handlers)
import pika

from labkit import leavings, steps
from labkit.access import Access
from labkit.delivery import BROKEN, Delivery
from labkit.ear import Ear
from labkit.errors import HandlerError, LedgerError, told
from labkit.ledger import Ledger
from labkit.message import POSITION_HEADER, UNREADABLE, Message, Unreadable
from labkit.origin import learner_frames
from labkit.outbox import Outbox
from labkit.sender import Sender
from labkit.shop import Shop
from labkit.status import Status
from labkit.topology import connect, port_of
from labkit.trace import Writer

_LOOK_S = 0.02                                        # how long a relay waits that found nothing while producers are at work
_TRIES = 2                                            # calls of a relay that raises, before it has nothing more to publish


def main(line_fd: int, trace_fd: int) -> None:
    """Runs one worker process to its end; the process's standard output is already the supervisor's pipe."""
    sys.stdout.reconfigure(line_buffering=True)       # what was printed before a kill is seen
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    Worker(socket.socket(fileno=line_fd), Writer(trace_fd)).run()


class Worker:
    """What one worker process knows."""

    def __init__(self, line: socket.socket, trace: Writer):
        self._connection = self._channel = None
        self._ear, self._trace = Ear(line, self._wake), trace
        self._inbox: collections.deque = collections.deque()
        self._current: Delivery | None = None
        self._access: Access | None = None
        self._count = 0
        self._private_fds: set[int] = set()
        self._is_copy = False
        os.register_at_fork(after_in_child=self._let_go)

    def run(self) -> None:
        """Does one job after the other, until the supervisor is gone."""
        self._address = self._ear.begin()
        if self._address is None:
            return
        try:
            self._connect()
            for done in itertools.count():
                self._ear.tell(t="free", done=done)
                while self._ear.jobs.empty():
                    self._connection.process_data_events(time_limit=None)
                self._work(*self._ear.jobs.get())
                self._open_channel()
        except BROKEN as error:
            self._ear.tell(t="unreachable", error=repr(error))

    def _work(self, job: dict[str, Any], blob: bytes) -> None:
        gc.enable()
        self._job, self._count, self._left_open, self._called = job, 0, False, False
        self._gate = steps.Gate(self._trace.write, self._ask, None if job["armed"] is None else {tuple(pair) for pair in job["armed"]})
        self._before = leavings.state()
        os.chdir(job["folder"])
        sys.path[:] = job["path"]
        try:
            self._handler = pickle.loads(blob)        # from the learner's kernel, over the private line
        except Exception as error:
            self._ear.tell(t="unusable", error=told(error))
            return
        self._access = Access(job["ledger"], self._gate, lambda: self._current)
        self._sender = Sender(self._dial, self._gate, lambda: self._current, job["events"], job["declared"])
        self._shop = Shop(Ledger(self._access, job["consumer"], job["forget_after"]), Status(self._access), Outbox(self._access), self._sender)
        while not self._ear.stopping:
            try:
                if job["queue"]:
                    self._subscribe()
                    self._consume()
                else:
                    self._produce()
            except pika.exceptions.AMQPChannelError:
                pass                                  # noted when it was closed
            except BROKEN as error:
                self._gate.note("connection.lost", None, error=type(error).__name__)
                self._connect()
        self._sender.close()
        if not self._ear.may_stay or not self._is_clean():
            self._fence_and_leave()
        self._access.close()
        sys.stdout.flush()
        try:
            self._channel.close()                     # a round trip: the broker has handled what was sent, or says what was wrong with it
        except pika.exceptions.AMQPChannelError:
            pass

    def _connect(self) -> None:
        self._private_fds = {self._ear.fileno()}
        self._connection = self._dial()
        self._open_channel()

    def _dial(self) -> pika.BlockingConnection:
        before = _descriptors()
        connection = connect(self._address)
        self._private_fds |= _descriptors() - before
        return connection

    def _open_channel(self) -> None:
        self._channel = self._connection.channel()
        self._channel._impl.add_on_close_callback(self._note_closing)         # pika tells it nowhere else, unless a call is under way

    def _note_closing(self, _, reason: Exception) -> None:
        by_handler = self._current and isinstance(reason, pika.exceptions.ChannelClosed)
        if by_handler or isinstance(reason, pika.exceptions.ChannelClosedByBroker):
            self._gate.note("channel.closed", self._current, code=reason.reply_code, text=reason.reply_text)

    def _subscribe(self) -> None:
        if not self._channel.is_open:
            self._open_channel()
        self._inbox.clear()
        automatic = self._job["automatic"]
        self._channel.add_on_cancel_callback(lambda _: self._gate.note("cancelled", None))
        if not automatic:
            self._channel.basic_qos(prefetch_count=self._job["prefetch"])
        self._channel.basic_consume(self._job["queue"], lambda *delivery: self._inbox.append(delivery), auto_ack=automatic)
        self._gate.note("started", None)

    def _consume(self) -> None:
        channel = self._channel
        while len(self._inbox) < self._job["fill"] and not self._ear.stopping:
            self._connection.process_data_events(time_limit=None)
        self._job["fill"] = 0
        while not self._ear.stopping and channel.is_open and channel.consumer_tags:
            if not self._inbox:
                self._connection.process_data_events(time_limit=0)
            if self._inbox:
                self._handle(*self._inbox.popleft())
            elif not self._ear.stopping:              # asked again: what would wake the next call may be used up
                self._ear.tell(t="idle", handled=self._count)
                self._connection.process_data_events(time_limit=None)
        if channel.is_open and not self._ear.stopping:
            channel.close()                           # cancelled by the broker: what it holds goes back to the queue

    def _produce(self) -> None:
        """Calls the producer; a relay again and again, until it is to go on to the end and has nothing more to publish."""
        failed = 0
        while not self._ear.stopping:
            passes, draining = self._sender.passes, self._ear.draining        # a look that began earlier may have missed the last event
            if self._job["again"] or not self._called:                        # else only the connection was lost
                self._called = True
                failed = 0 if self._call() else failed + 1
            if not self._job["again"] or draining and self._sender.passes == passes and not 0 < failed < _TRIES:
                self._ear.tell(t="idle", handled=0)
                while not self._ear.stopping:
                    self._connection.process_data_events(time_limit=None)
            else:
                self._ear.tell(t="passed")             # the supervisor reads the trace, and may end what does not end by itself
                self._connection.process_data_events(time_limit=0 if draining else _LOOK_S)

    def _call(self) -> bool:
        """Calls the producer or the relay, and tells whether it returned."""
        self._shop.outbox.empty_looks = 0
        try:
            self._enter(self._shop)
            self._leave_nothing_open()
            self._gate.note("returned", None)
        except BaseException as error:
            self._fail(error)
            return False
        return True

    def _handle(self, channel, method, properties, body: bytes) -> None:
        self._count += 1
        position = (properties.headers or {}).get(POSITION_HEADER)
        try:
            message = Message.from_wire(body, properties.message_id, properties.correlation_id)
        except Unreadable as error:
            message, unreadable = Message(UNREADABLE, properties.message_id or ""), error
        else:
            unreadable = None
        delivery = self._current = Delivery(self._count, message, position, method.delivery_tag, method.redelivered,
                                            channel, self._gate, settled=self._job["automatic"])
        try:
            with self._gate.step(steps.RECEIVE, delivery, message_id=message.message_id, effect_key=message.effect_key,
                                 position=position, tag=delivery.tag, redelivered=delivery.redelivered) as passage:
                delivery.attempt = passage.outcome = self._shop.ledger.log_delivery(message.message_id, message.effect_key, self._job["worker"])
            if delivery.attempt > self._job["max_deliveries"]:
                self._ear.tell(t="idle", handled=self._count)     # the supervisor ends the run at what it reads in the trace
                while not self._ear.stopping:
                    self._connection.process_data_events(time_limit=None)
                return
            if unreadable:
                raise unreadable
            self._enter(delivery, self._shop)
            self._leave_nothing_open()
            self._gate.note("returned", delivery)
        except BaseException as error:
            self._fail(error)
            if not delivery.settled and self._channel.is_open:
                # without the ledger nothing is known of this message, so it goes back, as often as its queue allows
                delivery.reject(requeue=delivery.attempt is None and isinstance(error, LedgerError))
        finally:
            self._current = None
            self._left_open |= not delivery.settled

    def _enter(self, *arguments: Any) -> None:
        try:
            self._handler(*arguments)
        finally:
            if self._is_copy:                         # a child that was forked inside came back, as no worker
                os._exit(0)

    def _fail(self, error: BaseException) -> None:
        """Notes what was raised, and undoes what was begun. SystemExit and KeyboardInterrupt end the process."""
        self._access.abandon()
        self._gate.note("raised", self._current, error=told(error), frames=learner_frames(error.__traceback__))
        if not isinstance(error, Exception):
            self._fence_and_leave(getattr(error, "code", 1))

    def _leave_nothing_open(self) -> None:
        """Undoes a transaction that was left open, and raises HandlerError: the next delivery would begin inside it."""
        if self._access.abandon():
            raise HandlerError("A transaction was left open, and was undone.", "it was begun by a statement of one's own, and not ended",
                               "Write `with shop.ledger.transaction():`.")

    def _is_clean(self) -> bool:
        """Tells whether another run may have this process: no delivery is open, and nothing was left behind."""
        return not self._left_open and not self._inbox and not leavings.anything_since(self._before)

    def _fence_and_leave(self, code: object = 0) -> None:
        """Ends the process once the broker has handled the acks and the messages that were sent; the broker takes back what was not."""
        self._sender.close()
        try:
            if self._channel.is_open:
                self._channel.basic_qos(prefetch_count=0)
        except BROKEN:
            pass
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))

    def _ask(self, name: str, phase: str, delivery: Delivery | None, detail: dict[str, Any]) -> None:
        if delivery:
            about = {"position": delivery.position, "message_id": delivery.message.message_id, "effect_key": delivery.message.effect_key,
                     "attempt": delivery.attempt, "tag": delivery.tag}
        else:
            about = {"position": None, "message_id": detail.get("event_id"), "effect_key": detail.get("effect_key"), "attempt": None}
        if name == steps.PUBLISH:                     # where a relay finds it
            about["where"] = self._sender.next
        elif name == steps.ACK:
            about["where"] = (port_of(self._connection), delivery.channel.channel_number, delivery.tag)
        self._ear.tell(t="gate", step=name, phase=phase, **about)
        while True:
            answer, blob = self._ear.answers.get()
            match answer["do"]:
                case "go":
                    return
                case "raise":
                    raise pickle.loads(blob)
                case "fence":
                    try:
                        self._sender.fence()
                        if delivery:
                            delivery.fence()
                    except BROKEN:
                        pass
                    self._ear.tell(t="fenced")
                case "lose":
                    if name == steps.ACK:
                        delivery.fence_next = True
                    else:
                        self._sender.settle_next = True
                    return

    def _wake(self) -> None:
        try:
            self._connection.add_callback_threadsafe(lambda: None)
        except (AttributeError, *BROKEN):             # not connected now: the loop looks at the flags by itself
            pass

    def _let_go(self) -> None:
        """In a child that the handler forks: writes no trace, and keeps nothing that would hold this worker's connection open."""
        self._is_copy, self._gate.write = True, lambda *_: None
        nowhere = os.open(os.devnull, os.O_RDWR)
        fds = {*self._private_fds, *filter(None, [self._access and self._access.fileno()])}
        for fd in fds - {nowhere}:                    # of a connection that has ended since
            os.dup2(nowhere, fd, inheritable=False)
        os.close(nowhere)


def _descriptors() -> set[int]:
    """Returns the open descriptors, without that of the listing itself."""
    return {int(fd) for fd in os.listdir("/dev/fd") if os.path.lexists(f"/dev/fd/{fd}")}
