"""A tape of made-up events, to show a run that never was: what the reports and the pictures are tested with."""
from labkit import account
from labkit.faults import crash
from labkit.message import reminders
from labkit.result import Facts, Run
from labkit.sweep import Sweep, SweepRow
from labkit.trace import Event

SETTINGS = {"handler": "remind", "workers": 1, "prefetch": 1, "acknowledge": "manual", "dead_letter": True}


class Tape:
    """Messages are published when the tape begins; each method adds what one thing leaves in the trace."""

    def __init__(self, messages=1):
        self.messages = reminders(messages) if isinstance(messages, int) else messages
        self.events, self._current, self._tags = [], {}, {}
        for position in range(1, len(self.messages) + 1):
            self._add("broker", "published", "note", position)

    def receive(self, position=1, attempt=1, worker=1, redelivered=None):
        self._tags[worker] = self._tags.get(worker, 0) + 1
        about = position, None, self._tags[worker]
        detail = {"redelivered": (attempt or 1) > 1 if redelivered is None else redelivered}
        self._add(f"worker {worker}", "receive", "before", *about, **detail)
        if attempt:
            self._current[worker] = about = position, attempt, self._tags[worker]
            self._add(f"worker {worker}", "receive", "after", *about, **detail)
        return self

    def reach(self, name, worker=1, **detail):
        return self._add(f"worker {worker}", name, "before", *self._current[worker], **detail)

    def step(self, name, outcome=None, worker=1, **detail):
        self.reach(name, worker, **detail)
        return self._add(f"worker {worker}", name, "after", *self._current[worker], **detail, **({"outcome": outcome} if outcome else {}))

    def note(self, name, worker=1, **detail):
        return self._add(f"worker {worker}", name, "note", *self._current.get(worker, ()), **detail)

    def kill(self, by, worker=1):
        self.note("fenced", worker)
        self._tags[worker] = 0
        return self.note("killed", worker, by=by)

    def told(self, name, position=1, **detail):
        return self._add("broker", name, "note", position, **detail)

    def handle(self, position=1, worker=1, attempt=1, step="ledger.record_once", outcome="recorded"):
        return self.receive(position, attempt, worker).step(step, outcome, worker).step("ack", "sent", worker, multiple=False).note("returned", worker)

    def run(self, effects, where=None, **facts):
        """Returns the run; `effects` are the numbers of effects in the order of the keys, `where` is a place for all or position -> place."""
        keys = list(dict.fromkeys(message.effect_key for message in self.messages))
        where = account.ACKED if where is None else where
        places = where if isinstance(where, dict) else {position: where for position in range(1, len(self.messages) + 1)}
        given = {"planned": [], "fired": [], "ending": "over", "settings": SETTINGS, "where": places,
                 "effects": None if effects is None else {key: number for key, number in zip(keys, effects) if number}, **facts}
        return Run(self.messages, self.events, Facts(**given))

    def _add(self, lane, name, phase, position=None, attempt=None, tag=None, **detail):
        message = self.messages[position - 1] if position else None
        self.events.append(Event(float(len(self.events)), lane, name, phase, message and message.message_id, message and message.effect_key,
                                 position, attempt, tag, detail))
        return self


def duplicated():
    fault = crash.after("ledger.record")
    tape = Tape().receive().step("ledger.record").kill(str(fault))
    return tape.handle(attempt=2, step="ledger.record", outcome=None).run([2], planned=[str(fault)], fired=[1])


def lost():
    fault = crash.after("ack")
    return Tape().receive().step("ack", "handled", multiple=False).kill(str(fault)).run([0], planned=[str(fault)], fired=[1])


def once():
    return Tape().handle().run([1])


def terminal():
    tape = Tape().receive().note("raised", error="ValueError: no address", frames=[]).reach("reject", requeue=False)
    tape.told("dead-lettered", reason="rejected")     # heard of before the worker goes on, as happens
    tape._add("worker 1", "reject", "after", 1, 1, 1, requeue=False, outcome="sent")
    return tape.run([0], account.DEAD_LETTERED, errors=["ValueError: no address (line 2 of remind)"])


def ack_dropped():
    tape = Tape().receive().step("ledger.record_once", "recorded").reach("ack", multiple=False)
    tape.told("ack.dropped", relay="dropped: basic.ack, channel 1, tag 1; connection cut")
    tape._add("worker 1", "ack", "after", 1, 1, 1, multiple=False, outcome="unknown").note("returned").note("connection.lost", error="StreamLostError")
    return tape.handle(attempt=2, outcome="duplicate").run([1], planned=["lose.ack()"], fired=[1])


def in_transaction(crash_before_commit=False):
    tape = Tape().receive().step("ledger.begin").step("ledger.record")
    if crash_before_commit:
        tape.reach("ledger.commit").kill("crash.before('ledger.commit')")
        tape.receive(attempt=2).step("ledger.begin").step("ledger.record")
    return tape.step("ledger.commit").step("ack", "sent", multiple=False).note("returned").run([1])


def sweep(name, **outcomes):
    """Returns a sweep with a row for each `before_ack=run`; the row without a crash is `no_crash`."""
    rows = []
    for point, run in outcomes.items():
        phase, _, step = point.partition("_")
        fault = getattr(crash, phase)(step.replace("__", ".")) if point != "no_crash" else None
        rows.append(SweepRow((fault,) if fault else (), run))
    return Sweep(name, rows)


def late():
    return sweep("late", no_crash=once(), before_receive=once(), after_receive=once(), before_ledger__record=once(),
                 after_ledger__record=duplicated(), before_ack=duplicated(), after_ack=once())


def early():
    return sweep("early", no_crash=once(), before_receive=once(), after_receive=once(), before_ack=once(), after_ack=lost(),
                 before_ledger__record=lost(), after_ledger__record=once())
