"""The steps: everything a handler does to the outside world, each by one name, through one gate.

Step names are declared here and nowhere else. The gate writes the trace, and asks the supervisor wherever a fault is
planned (or, in a stepped run, everywhere); what happens then is the supervisor's decision.
"""

from collections.abc import Callable, Collection
from typing import Any

from labkit.errors import told

#: step name -> what passing it means
STEPS: dict[str, str] = {}


def _step(name: str, meaning: str) -> str:
    STEPS[name] = meaning
    return name


RECEIVE = _step("receive", "the delivery is written to the ledger's delivery log, and the handler is entered")
LEDGER_FIND = _step("ledger.find", "the ledger is asked for an effect by its key")
LEDGER_RECORD = _step("ledger.record", "an effect is written, with nothing against a second one")
LEDGER_RECORD_ONCE = _step("ledger.record_once", "an effect is written together with its unique key, or found to be a duplicate")
LEDGER_BEGIN = _step("ledger.begin", "a transaction of the ledger is opened")
LEDGER_COMMIT = _step("ledger.commit", "the transaction is made durable, all of it at once")
LEDGER_ROLLBACK = _step("ledger.rollback", "the transaction is undone, all of it at once")
LEDGER_REMEMBER = _step("ledger.remember", "the message id is written to the inbox of this consumer")
STATUS_MOVE = _step("status.move", "the status of an entity is changed, if it is the expected one")
LEDGER_EXECUTE = _step("ledger.execute", "a statement of the learner's own runs in the ledger's database")
OUTBOX_ADD = _step("outbox.add", "an event is written to the outbox, to be published later")
OUTBOX_READ = _step("outbox.read", "the outbox is asked for the events that are not published yet")
OUTBOX_MARK = _step("outbox.mark", "an event of the outbox is noted as published")
PROVIDER_CHARGE = _step("provider.charge", "the provider is asked over HTTP to charge a customer, and its answer is waited for")
PUBLISH = _step("publish", "a message is sent to the broker")
CONFIRM = _step("confirm", "the broker's word on what was sent is waited for")
RETRY_PUBLISH = _step("retry.publish", "the message is published again, into the queue of its delay, and the broker's confirm is waited for")
TERMINAL_RECORD = _step("terminal.record", "the message is written down for a person to decide on, in the ledger's database")
ACK = _step("ack", "the broker is told that the delivery is done with")
NACK = _step("nack", "the broker is told that the delivery failed, and may be asked to give it again")
REJECT = _step("reject", "the broker is told that the delivery is refused, and may be asked to give it again")

#: the steps that answer a delivery
ANSWERS = (ACK, NACK, REJECT)

#: what the trace tells beside the steps -> its meaning; nothing can be planned to happen at these
NOTES: dict[str, str] = {
    "started": "a worker process began to consume",
    "returned": "the handler returned",
    "raised": "the handler raised an error",
    "parked already": "the message has a terminal record from an earlier attempt, so the handler is not entered, and the delivery is acked",
    "waiting": "the ledger is locked by another worker, and this one waits for its turn to try again",
    "fenced": "a round trip on the channel: the broker has handled everything sent before",
    "channel.closed": "the broker closed the channel",
    "cancelled": "the broker cancelled the consumer",
    "connection.lost": "the worker's connection to the broker ended",
    "published": "the broker confirmed the message",
    "killed": "the worker process ended by signal 9",
    "exited": "the worker process ended by itself",
    "stopped": "the worker process was frozen by signal 19 (SIGSTOP)",
    "continued": "the worker process was let go on (SIGCONT)",
    "ack.dropped": "the TCP relay read the ack, passed nothing on and cut the connection",
    "publish.dropped": "the TCP relay read the published message, passed nothing on and cut the connection",
    "confirm.dropped": "the TCP relay read the broker's confirm, passed nothing on and cut the connection",
    "charged": "the provider made a charge, and no worker heard of it",
    "dead-lettered": "the broker moved the message to the dead-letter queue",
}

BEFORE, AFTER, FAILED, NOTE = "before", "after", "failed", "note"
WAITING = "waiting"                                   # not a phase of an event: a worker asks when it may try again
PHASES = (BEFORE, AFTER, FAILED, NOTE)
NAMES = (*STEPS, *NOTES)


class Gate:
    """The one gate of a worker: `with gate.step(name, delivery) as passage:` is passed before and after the body.

    write(name, phase, delivery number, detail) stores the event; ask(name, phase, delivery, detail) puts it to the supervisor
    and returns when the worker may go on (or does not return, or raises the planned error).
    armed holds the (name, phase) pairs to ask about; None asks about every one, for a stepped run.
    """

    def __init__(self, write: Callable, ask: Callable, armed: Collection[tuple[str, str]] | None):
        self.write, self.ask, self.armed = write, ask, armed

    def step(self, name: str, delivery: Any, **detail: Any) -> "Passage":
        """Returns the passage of one step; `detail` holds JSON values for the trace."""
        return Passage(self, name, delivery, detail)

    def note(self, name: str, delivery: Any, **detail: Any) -> None:
        """Writes something that is not a step to the trace."""
        self.write(name, NOTE, delivery.number if delivery else 0, detail)

    @property
    def stepped(self) -> bool:
        """Tells whether the supervisor is asked everywhere, and so says whose turn it is."""
        return self.armed is None

    def wait(self, delivery: Any) -> None:
        """Tells that a lock is in the way, and returns when it may be free."""
        self.note("waiting", delivery)
        self.ask("waiting", WAITING, delivery, {})

    def watches(self, name: str, phase: str) -> bool:
        """Tells whether the supervisor is asked at this gate."""
        return self.armed is None or (name, phase) in self.armed


class Passage:
    """One step under way. Put what the step came to into `outcome`; it is written after the step."""

    __slots__ = ("_gate", "_name", "_delivery", "_detail", "outcome")

    def __init__(self, gate: Gate, name: str, delivery: Any, detail: dict):
        self._gate, self._name, self._delivery, self._detail, self.outcome = gate, name, delivery, detail, None

    def __enter__(self) -> "Passage":
        try:
            self._pass(BEFORE, self._detail)
        except BaseException as error:                # planned to be raised here; no __exit__ follows
            self._fail(error)
            raise
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None:
            self._pass(AFTER, {} if self.outcome is None else {"outcome": self.outcome})
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._gate.write(self._name, FAILED, self._delivery.number if self._delivery else 0, {"error": told(error)})

    def _pass(self, phase: str, detail: dict) -> None:
        gate, name, delivery = self._gate, self._name, self._delivery
        gate.write(name, phase, delivery.number if delivery else 0, detail)
        if gate.armed is None or (name, phase) in gate.armed:
            gate.ask(name, phase, delivery, self._detail)
