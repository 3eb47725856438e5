"""The worker process: connects, waits for a run's job, and calls what it was given; killed in the middle of any of it.

A job is to consume from a queue, with a handler (`consumer`), or to call a producer once, or a relay until nothing is left for it (`caller`).

Forked from the fork server. One thread does the work; a second one hears the supervisor.
"""

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
from labkit.caller import Caller
from labkit.consumer import Consumer
from labkit.delivery import Delivery
from labkit.ear import Ear
from labkit.errors import HandlerError, told
from labkit.ledger import Ledger
from labkit.origin import learner_frames
from labkit.outbox import Outbox
from labkit.provider.client import Client
from labkit.sender import Sender
from labkit.shop import Shop
from labkit.status import Status
from labkit.terminal import Terminal
from labkit.topology import BROKEN, connect, port_of
from labkit.trace import Writer


def main(line_fd: int, trace_fd: int) -> None:
    """Runs one worker process to its end; the process's standard output is already the supervisor's pipe."""
    sys.stdout.reconfigure(line_buffering=True)       # what was printed before a kill is seen
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    Worker(socket.socket(fileno=line_fd), Writer(trace_fd)).run()


class Worker:
    """What one worker process knows. What stands without an underscore is for the job that it does: `Consumer` or `Caller`."""

    def __init__(self, line: socket.socket, trace: Writer):
        self.connection = self.channel = None
        self.ear, self._trace = Ear(line, self._wake), trace
        self.current: Delivery | None = None
        self.access: Access | None = None
        self._private_fds: set[int] = set()
        self._is_copy = False
        os.register_at_fork(after_in_child=self._let_go)

    def run(self) -> None:
        """Does one job after the other, until the supervisor is gone."""
        self._address = self.ear.begin()
        if self._address is None:
            return
        try:
            self._connect()
            for done in itertools.count():
                self.ear.tell(t="free", done=done)
                while self.ear.jobs.empty():
                    self.connection.process_data_events(time_limit=None)
                self._work(*self.ear.jobs.get())
                self.open_channel()
        except BROKEN as error:
            self.ear.tell(t="unreachable", error=repr(error))

    def _work(self, job: dict[str, Any], blob: bytes) -> None:
        gc.enable()
        self.gate = steps.Gate(self._trace.write, self._ask, None if job["armed"] is None else {tuple(pair) for pair in job["armed"]})
        before = leavings.state()
        os.chdir(job["folder"])
        sys.path[:] = job["path"]
        try:
            self._function, policy = pickle.loads(blob)                       # from the learner's kernel, over the private line
        except Exception as error:
            self.ear.tell(t="unusable", error=told(error))
            return
        self.access = Access(job["ledger"], self.gate, lambda: self.current)
        self.sender = Sender(self._dial, self.gate, lambda: self.current, job["events"], job["declared"])
        self.shop = Shop(Ledger(self.access, job["consumer"], job["forget_after"]), Status(self.access), Outbox(self.access), Terminal(self.access), self.sender,
                         Client(self.gate, lambda: self.current, self._find_provider))
        work = Consumer(self, job, policy) if job["queue"] else Caller(self, job)
        while not self.ear.stopping:
            try:
                work.go_on()
            except pika.exceptions.AMQPChannelError:
                pass                                  # noted when it was closed
            except BROKEN as error:
                self.gate.note("connection.lost", None, error=type(error).__name__)
                self._connect()
        self.sender.close()
        if not self.ear.may_stay or not work.left_nothing or leavings.anything_since(before):
            self._fence_and_leave()
        self.access.close()
        sys.stdout.flush()
        try:
            self.channel.close()                      # a round trip: the broker has handled what was sent, or says what was wrong with it
        except pika.exceptions.AMQPChannelError:
            pass

    def enter(self, *arguments: Any) -> None:
        """Calls the handler, the producer or the relay."""
        try:
            self._function(*arguments)
        finally:
            if self._is_copy:                         # a child that was forked inside came back, as no worker
                os._exit(0)

    def fail(self, error: BaseException, **detail: Any) -> None:
        """Notes what was raised, and undoes what was begun. SystemExit and KeyboardInterrupt end the process."""
        self.access.abandon()
        self.gate.note("raised", self.current, error=told(error), frames=learner_frames(error.__traceback__), **detail)
        error.__traceback__ = None                    # an object that is raised again and again would carry them all along
        if not isinstance(error, Exception):
            self._fence_and_leave(getattr(error, "code", 1))

    def leave_nothing_open(self) -> None:
        """Undoes a transaction that was left open, and raises HandlerError: the next delivery would begin inside it."""
        if self.access.abandon():
            raise HandlerError("A transaction was left open, and was undone.", "it was begun by a statement of one's own, and not ended",
                               "Write `with shop.ledger.transaction():`.")

    def open_channel(self) -> None:
        """Opens a channel for deliveries."""
        self.channel = self.connection.channel()
        self.channel._impl.add_on_close_callback(self._note_closing)          # pika tells it nowhere else, unless a call is under way

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the broker, or for a word of the supervisor; for as long as it takes where no time is given."""
        self.connection.process_data_events(time_limit=seconds)

    def _connect(self) -> None:
        self._private_fds = {self.ear.fileno()}
        self.connection = self._dial()
        self.open_channel()

    def _dial(self) -> pika.BlockingConnection:
        before = _descriptors()
        connection = connect(self._address)
        self._private_fds |= _descriptors() - before
        return connection

    def _note_closing(self, _, reason: Exception) -> None:
        by_handler = self.current and isinstance(reason, pika.exceptions.ChannelClosed)
        if by_handler or isinstance(reason, pika.exceptions.ChannelClosedByBroker):
            self.gate.note("channel.closed", self.current, code=reason.reply_code, text=reason.reply_text)

    def _fence_and_leave(self, code: object = 0) -> None:
        """Ends the process once the broker has handled the acks and the messages that were sent; the broker takes back what was not."""
        self.sender.close()
        try:
            if self.channel.is_open:
                self.channel.basic_qos(prefetch_count=0)
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
            about["where"] = self.sender.next
        elif name == steps.ACK:
            about["where"] = (port_of(self.connection), delivery.channel.channel_number, delivery.tag)
        self.ear.tell(t="gate", step=name, phase=phase, **about)
        while True:
            answer, blob = self.ear.answers.get()
            match answer["do"]:
                case "go":
                    return
                case "raise":
                    raise pickle.loads(blob)
                case "fence":
                    try:
                        self.sender.fence()
                        if delivery:
                            delivery.fence()
                    except BROKEN:
                        pass
                    self.ear.tell(t="fenced")
                case "lose":
                    if name == steps.ACK:
                        delivery.fence_next = True
                    else:
                        self.sender.settle_next = True
                    return

    def _find_provider(self, refused: str | None = None) -> dict[str, Any]:
        """Asks the supervisor where the provider is, which starts it; or tells that nobody listened there, for this effect key."""
        if self._is_copy:
            raise HandlerError("A child of the handler's process cannot reach the provider.", "only the process that was given the delivery is known",
                               "Call the provider from the handler itself.")
        self.ear.tell(t="provider", refused=refused)
        answer, _ = self.ear.answers.get()
        return answer

    def _wake(self) -> None:
        try:
            self.connection.add_callback_threadsafe(lambda: None)
        except (AttributeError, *BROKEN):             # not connected now: the loop looks at the flags by itself
            pass

    def _let_go(self) -> None:
        """In a child that the handler forks: writes no trace, and keeps nothing that would hold this worker's connection open."""
        self._is_copy, self.gate.write = True, lambda *_: None
        nowhere = os.open(os.devnull, os.O_RDWR)
        fds = {*self._private_fds, *filter(None, [self.access and self.access.fileno()])}
        for fd in fds - {nowhere}:                    # of a connection that has ended since
            os.dup2(nowhere, fd, inheritable=False)
        os.close(nowhere)


def _descriptors() -> set[int]:
    """Returns the open descriptors, without that of the listing itself."""
    return {int(fd) for fd in os.listdir("/dev/fd") if os.path.lexists(f"/dev/fd/{fd}")}
