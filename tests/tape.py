"""A tape of made-up events, to show a run that never was: what the reports and the pictures are tested with."""
from labkit import account
from labkit.faults import crash
from labkit.message import reminders
from labkit.production import Production
from labkit.facts import Facts
from labkit.result import Run
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

    def receive(self, position=1, attempt=1, worker=1, redelivered=None, copy=0):
        self._tags[worker] = self._tags.get(worker, 0) + 1
        about = position, None, self._tags[worker]
        detail = {"redelivered": (attempt or 1) > 1 if redelivered is None else redelivered, **({"copy": copy} if copy else {})}
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

    def retry(self, delay_ms, outcome="confirmed", error="TimeoutError: slow"):
        """The handler raises, and the message is published again."""
        self.note("raised", error=error, frames=[], kind="temporary")
        return self.step("retry.publish", outcome, delay_ms=delay_ms, reason=error.split(":")[0])

    def charge(self, error=None, unheard=False, worker=1):
        """A call of the provider, which charges or raises; one that is unheard was made, and its answer came to nobody."""
        self.reach("provider.charge", worker)
        if unheard:
            self.unheard()
        after = {"error": error} if error else {"outcome": "charge-1"}
        return self._add(f"worker {worker}", "provider.charge", "failed" if error else "after", *self._current[worker], **after)

    def unheard(self):
        """The provider makes a charge that nobody hears of."""
        self._add("provider", "charged", "note")
        object.__setattr__(self.events[-1], "effect_key", self.messages[0].effect_key)
        return self

    def run(self, effects, where=None, **facts):
        """Returns the run; `effects` are the numbers of effects in the order of the keys, `where` is a place for all or position -> place."""
        keys = list(dict.fromkeys(message.effect_key for message in self.messages))
        where = account.ACKED if where is None else where
        places = where if isinstance(where, dict) else {position: where for position in range(1, len(self.messages) + 1)}
        given = {"planned": [], "fired": [], "ending": "over", "settings": SETTINGS, "where": {position: [place] for position, place in places.items()},
                 "effects": None if effects is None else {key: number for key, number in zip(keys, effects) if number}, **facts}
        return Run(self.messages, self.events, Facts(**given))

    def _add(self, lane, name, phase, position=None, attempt=None, tag=None, **detail):
        message = self.messages[position - 1] if position else None
        self.events.append(Event(float(len(self.events)), lane, name, phase, message and message.message_id, message and message.effect_key,
                                 position, attempt, tag, detail))
        return self


def used_up():
    """A message that is tried twice, and then put before a person."""
    tape = Tape().receive().retry(100).step("ack", "sent").receive(1, 2, redelivered=False, copy=1)
    return tape.note("raised", error="TimeoutError: slow", frames=[], kind="temporary").step("terminal.record", "recorded", route="manual-review", reason="TimeoutError").step(
        "ack", "sent").run([0], where={1: account.ACKED}, records=[{"message_id": "reminder-1", "effect_key": "invoice-1:reminder", "route": "manual-review"}])


def charged_twice():
    """Once each before and after a kill."""
    fault = crash.after("provider.charge")
    tape = Tape().receive().charge().kill(str(fault)).receive(attempt=2).charge().step("ledger.record_once", "recorded")
    return tape.step("ack", "sent", multiple=False).note("returned").run([1], charges={"invoice-1:reminder": 2}, planned=[str(fault)], fired=[1])


def charged_unheard():
    """Refused, turned away, unheard in time, and unheard too late."""
    tape = Tape()
    for attempt, (error, unheard) in enumerate([("ConnectionRefusedError: nobody listens", False), ("HTTPError: HTTP Error 429: Too Many Requests", False),
                                                ("TimeoutError: timed out", True), ("TimeoutError: timed out", False)], 1):
        tape.receive(attempt=attempt).charge(error, unheard)
        if attempt < 4:
            tape.kill("hand")
    return tape.step("reject", "sent", requeue=False).note("returned").unheard().run([0], account.DEAD_LETTERED, charges={"invoice-1:reminder": 2})


def doubled():
    """A worker that dies between the publish of the retry and the ack: two copies."""
    return Tape().receive().retry(50).kill("crash.after('retry.publish')").handle(1, attempt=2).receive(1, 3, redelivered=False, copy=1).step(
        "ledger.record_once", "duplicate").step("ack", "sent").note("returned").run([1])


class Produced:
    """The same for producers and relays. `by` says whose the next events are; a key is named by what concerns one."""

    def __init__(self):
        self.events, self._lane, self.published = [], "producer 1", []

    def by(self, lane):
        self._lane = lane
        return self

    def reach(self, name, key=None, event_id=None, **detail):
        return self._add(self._lane, name, "before", key, event_id, **detail)

    def step(self, name, key=None, outcome=None, event_id=None, phase="after", **detail):
        self.reach(name, key, event_id, **detail)
        return self._add(self._lane, name, phase, key, event_id, **detail, **({"outcome": outcome} if outcome else {}))

    def note(self, name, key=None, **detail):
        return self._add(self._lane, name, "note", key, **detail)

    def told(self, name, key, **detail):
        return self._add("broker", name, "note", key, **detail)

    def kill(self, by):
        return self.note("killed", by=str(by))

    def order(self, *keys, outbox=False):
        """Records orders in one transaction, with their events in the outbox or without."""
        self.step("ledger.begin")
        for key in keys:
            self.step("ledger.record", key)
            if outbox:
                self.step("outbox.add", key, "added")
        return self.step("ledger.commit")

    def send(self, key, event_id=None):
        self.published.append({"effect_key": key, "message_id": event_id or f"event-of-{key}"})
        return self.step("publish", key, "sent", event_id)

    def publish(self, key, outcome="confirmed", event_id=None):
        return self.send(key, event_id).step("confirm", key, outcome, event_id)

    def publish_unheard(self, key):
        """The broker takes the event, and its confirm is dropped on the way back."""
        self.send(key).reach("confirm", key).told("confirm.dropped", key, relay="dropped: basic.ack, channel 1, tag 1; connection cut")
        return self._add(self._lane, "confirm", "after", key, outcome="unknown")

    def publish_dropped(self, key, outcome="sent"):
        """The event is dropped on its way to the broker."""
        self.reach("publish", key).told("publish.dropped", key, relay="dropped: basic.publish, channel 1, number 1; connection cut")
        return self._add(self._lane, "publish", "after", key, outcome=outcome).step("confirm", key, "unknown")

    def pass_on(self, *keys, waiting=None):
        """One pass of a relay."""
        self.by("relay 1").step("ledger.begin").step("outbox.read", outcome=f"{waiting or len(keys)} waiting")
        for key in keys:
            self.publish(key).step("outbox.mark", key)
        return self.step("ledger.commit").note("returned")

    def run(self, *orders, outbox=None, **facts):
        """Returns the run; `orders` are the keys of those that are there, `outbox` holds key -> events that wait."""
        settings = {"producer": "place", "relay": "publish_outbox" if any(event.lane == "relay 1" for event in self.events) else None}
        given = {"planned": [], "fired": [], "ending": "over", "settings": settings, "where": {}, "effects": dict.fromkeys(orders, 1),
                 "published": self.published, "outbox": outbox or {}, **facts}
        return Production([], self.events, Facts(**given))

    def _add(self, lane, name, phase, key=None, event_id=None, **detail):
        about = {"effect_key": key} if key and lane != "broker" and phase != "note" else {}
        if key and name != "ledger.record":
            event_id = event_id or f"event-of-{key}"
            about |= {"event_id": event_id} if about else {}
        self.events.append(Event(float(len(self.events)), lane, name, phase, event_id, key, detail={**about, **detail}))
        return self


def committed_first():
    return Produced().order("order-1").publish("order-1").note("returned").run("order-1")


def event_lost():
    return Produced().order("order-1").kill(crash.after("ledger.commit")).run("order-1")


def stray():
    tape = Produced().publish("order-1").step("ledger.begin").step("ledger.record", "order-1").reach("ledger.commit")
    return tape.kill(crash.before("ledger.commit")).run()


def nothing():
    return Produced().step("ledger.begin").reach("ledger.record", "order-1").kill(crash.before("ledger.record")).run()


def confirm_dropped():
    return Produced().order("order-1").publish_unheard("order-1").note("returned").run("order-1")


def passed_on():
    return Produced().order("order-1", outbox=True).note("returned").pass_on("order-1").run("order-1")


def repeated():
    tape = Produced().order("order-1", outbox=True).note("returned").by("relay 1").step("ledger.begin").step("outbox.read", outcome="1 waiting")
    return tape.publish("order-1").kill(crash.after("confirm", worker="relay")).pass_on("order-1").run("order-1")


def left_in_the_outbox():
    return Produced().order("order-1", outbox=True).note("returned").run("order-1", outbox={"order-1": 1})


def many_orders():
    tape = Produced()
    for number in range(1, 31):
        tape.order(f"order-{number}")
        for at in range(0 if number == 7 else 2 if number in (12, 15) else 1):
            tape.publish(f"order-{number}", event_id=f"another {at}" if number == 15 else None)
    return tape.publish("order-99").run(*[f"order-{number}" for number in range(1, 31)])


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
    """Returns a sweep with a row for each `before_ack=run`, or `relay_before_publish=run`; the row without a crash is `no_crash`."""
    rows = []
    for point, run in outcomes.items():
        whose = {"worker": "relay"} if point.startswith("relay_") else {}
        phase, _, step = point.removeprefix("relay_").partition("_")
        fault = getattr(crash, phase)(step.replace("__", "."), **whose) if point != "no_crash" else None
        rows.append(SweepRow((fault,) if fault else (), run))
    return Sweep(name, rows)


def late():
    return sweep("late", no_crash=once(), before_receive=once(), after_receive=once(), before_ledger__record=once(),
                 after_ledger__record=duplicated(), before_ack=duplicated(), after_ack=once())


def early():
    return sweep("early", no_crash=once(), before_receive=once(), after_receive=once(), before_ack=once(), after_ack=lost(),
                 before_ledger__record=lost(), after_ledger__record=once())


def of_commit_first():
    return sweep("commit_first", no_crash=committed_first(), before_ledger__commit=nothing(), after_ledger__commit=event_lost(),
                 after_publish=committed_first())


def of_outbox():
    points = [f"{phase}_{step}" for step in ("ledger__begin", "ledger__record", "outbox__add", "ledger__commit") for phase in ("before", "after")]
    passes = [f"relay_{phase}_{step}" for step in ("ledger__begin", "outbox__read", "publish", "confirm", "outbox__mark", "ledger__commit")
              for phase in ("before", "after")]
    return sweep("with_outbox", no_crash=passed_on(), **{point: nothing() for point in points[:-1]}, after_ledger__commit=passed_on(),
                 **{point: repeated() if 4 < at < 11 else passed_on() for at, point in enumerate(passes)})
