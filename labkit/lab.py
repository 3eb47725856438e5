"""The lab: finds the broker, runs handlers against it, and sweeps their crash points."""

import atexit
import difflib
import inspect
import os
import pathlib
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from labkit import controller, databases, message as samples, ship, topology
from labkit.amqp import ANSWER_S, Session
from labkit.broker import Broker, find
from labkit.consuming import Consuming
from labkit.crew import Crew
from labkit.delays import ONE_EACH, measure
from labkit.errors import LedgerError, PlanError
from labkit.expiry import Expiry, expire
from labkit.faults import Fault
from labkit.live import Live
from labkit.message import Message
from labkit.paths import runs
from labkit.plan import MESSAGES_NOW, Plan, many, one_of, positive
from labkit.producing import ProducePlan, Producing
from labkit.production import Production
from labkit.provider.owner import Provider
from labkit.provider.tab import Tab
from labkit.race import Race
from labkit.result import Run
from labkit.retry import RetryPolicy
from labkit.supervisor import Supervisor
from labkit.survival import Survival, survive
from labkit.sweep import Sweep, all_points
from labkit.watch import Watch, watch


class Lab:
    """A broker, standby workers and a place for ledgers.

    ledger:    "postgresql://user:password@host/database" keeps the ledgers there; without it each is an SQLite file
    private:   a RabbitMQ node of its own, which may be killed, instead of the one shared by open notebooks
    settings:  RabbitMQ application settings of such a node, as {"consumer_timeout": 3000}
    broker:    one that `labkit.broker.find` has found already, and that somebody else gives back
    quiet:     does not print which broker is used
    Raises BrokerError when there is no broker to be had, LedgerError when there is no such database.
    """

    reminders = staticmethod(samples.reminders)
    shipments = staticmethod(samples.shipments)
    status_events = staticmethod(samples.status_events)

    def __init__(self, *, ledger: str | None = None, private: bool = False, settings: dict[str, Any] | None = None,
                 broker: Broker | None = None, quiet: bool = False):
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="run-", dir=runs()))
        self._home = databases.home(ledger, self._folder)
        self.broker = broker or find(private=private, settings=settings)
        self._borrowed = broker is not None
        self._address = self.broker.address
        self._prefix, self._runs = f"labkit.{uuid.uuid4().hex[:8]}", 0
        self._process, self._under_way = os.getpid(), weakref.WeakSet()
        self._session: Session | None = None
        self._crew: Crew | None = None
        self._provider = Provider()
        controller.carry_out(self._open())
        atexit.register(self.close)
        if not quiet:
            print(self.broker)

    def run(self, handler: Callable, messages: Iterable[Message], *, faults: Sequence[Fault] = (), workers: int = 1, prefetch: int = 1,
            acknowledge: str = "manual", queue_type: str = "quorum", dead_letter: bool = True, delivery_limit: int | None = None,
            max_deliveries: int = 20, retry: RetryPolicy | None = None, forget_after: int | None = None, publish: str = "first", rate: float | None = None, continue_from: Run | None = None,
            deadline_s: float = 15, **unknown: Any) -> Run:
        """Publishes the messages, lets workers handle them under the planned faults, and returns the judged run.

        acknowledge:     "manual", or "automatic" acknowledgement with "auto"
        delivery_limit:  the broker's own limit of redeliveries, on quorum queues
        max_deliveries:  the run stops when one message is handed out more often
        retry:           what becomes of a delivery whose handler raises; without one it is rejected, and not given again
        forget_after:    the ledger keeps so many effect keys, the newest, and forgets older ones; None keeps all
        publish:         all messages "first", or "while" the workers run, `rate` messages a second
        continue_from:   goes on with the ledger of an earlier run
        deadline_s:      seconds after which the run is ended, and its verdict unknown
        Raises PlanError, HandlerError, LedgerError or BrokerError; what happens inside the handler is in the run.
        """
        _check("run", unknown)
        return self._begin(handler, messages, faults=faults, workers=workers, prefetch=prefetch, acknowledge=acknowledge,
                           queue_type=queue_type, dead_letter=dead_letter, delivery_limit=delivery_limit, max_deliveries=max_deliveries,
                           retry=retry, forget_after=forget_after,
                           publish=publish, rate=rate, continue_from=continue_from, deadline_s=deadline_s).wait()

    def start(self, handler: Callable, messages: Iterable[Message], **arguments: Any) -> Live:
        """Begins the same run and returns at once; takes the arguments of `run`."""
        _check("start", arguments)
        return self._begin(handler, messages, **arguments)

    def watch(self, live: Live, *, every_ms: float = 100, for_s: float | None = None, on_sample: Callable[[Watch], Any] | None = None,
              name: str | None = None) -> Watch:
        """Looks at a run that is under way, again and again until it is over or for_s seconds have passed, and returns what was seen.

        on_sample: called with the watch so far, whose last sample is new: on the thread that called `watch`, so that it may print, draw and
                   raise. While it works the samples go on; where it is slower than they are it is not called for each
        name:      how a picture calls this run; the name of the handler unless you say otherwise
        An interrupt ends the watching, and not the run. How the run ended is told by live.wait(). Raises PlanError.
        """
        return watch(live, every_ms, for_s, on_sample, name)

    def sweep(self, handler: Callable, messages: Iterable[Message] | None = None, depth: int = 1, **arguments: Any) -> Sweep:
        """Runs without a crash to find the steps, then once for each crash point: before and after each step, at each attempt that takes it.

        Without messages it is a producer that is swept, with the arguments of `produce`. depth=2 kills a second time, at each
        step that only the recovery takes. Takes the other arguments of `run`, but for the faults, and raises as `run` does.
        """
        _check("produce" if messages is None else "sweep", arguments, faults="a sweep plans the faults itself")
        one_of("depth", depth, 1, 2)
        if messages is None:
            def run(*faults: Fault) -> Run:
                return self.produce(handler, faults=faults, **arguments)
        else:
            if not (messages := many("messages", messages, MESSAGES_NOW)):
                raise PlanError("There is no message to sweep with.", "the list is empty, and without a delivery there is no crash point", MESSAGES_NOW)

            def run(*faults: Fault) -> Run:
                return self.run(handler, messages, faults=faults, **arguments)
        return Sweep(ship.name_of(handler), all_points(run, depth))

    def produce(self, producer: Callable, *others: Any, relay: Callable | None = None, faults: Sequence[Fault] = (), producers: int = 1, relays: int = 1,
                relay_starts: str = "after", max_length: int | None = None, continue_from: Run | None = None, deadline_s: float = 15, **unknown: Any) -> Production:
        """Calls producer(shop) in a process of its own, lets relays publish what it left in the outbox, and returns the judged run.

        An order is a row of the ledger's effects, and its event the published message with the same effect key. A producer that
        dies is not called again: whoever waited for it has got an error. A relay that dies is replaced.
        relay:          a function relay(shop), called until it has nothing more to publish, such as `labkit.publish_outbox`
        producers:      so many processes call the producer at once; relays: so many call the relay
        relay_starts:   "after" the producers have ended, or "beside" them
        max_length:     the queue of events refuses what is more
        Takes continue_from and deadline_s as `run` does, and raises as `run` does.
        """
        _check("produce", unknown)
        if others:
            raise PlanError("lab.produce takes one producer, and the rest by name.", "messages are for a handler, which lab.run takes",
                            "Write lab.produce(producer, relay=publish_outbox), or lab.run(handler, messages).")
        plan = ProducePlan(producer, self._ledger(continue_from), relay, faults, producers, relays, relay_starts, max_length, deadline_s)
        return self._start(plan, Producing).wait()

    def race(self, handler: Callable, message: Message, workers: int = 2, limit: int = 500, seed: int | None = None, **arguments: Any) -> Race:
        """Gives each worker a copy of one message, and tries every order of their steps, one run each.

        limit: schedules to try at most; a search that was cut off is unknown, unless it found a break
        seed:  draws which orders are tried first; without one the first worker goes as far as it can
        Takes the other arguments of `run`, but for faults, prefetch and acknowledge. Raises as `run` does.
        """
        _check("race", arguments, faults="a race plans the order of the steps, and nothing else", prefetch="each worker holds one copy",
               acknowledge="the ack is one of the steps whose order is tried")
        positive("workers", workers, int)
        positive("limit", limit, int)
        if workers < 2:
            raise PlanError("A race of one worker proves nothing.", "there is nobody to race with", "Leave `workers` out, or write workers=2.")

        def run(order: Sequence[int]) -> Run:
            return self._begin(handler, [message] * workers, workers=workers, order=tuple(order), seed=seed, **arguments).wait()
        return Race(ship.name_of(handler), run, limit)

    def survival(self, messages: int = 200) -> Survival:
        """Kills the broker's process and starts it again, once, and shows what its queues still hold, by kind of queue, of message and of publishing.

        messages: how many are published to each queue
        For a lab with private=True, while none of its runs is under way. Raises PlanError or BrokerError.
        """
        return self._with_a_kill(survive, messages)

    def expiry(self, messages: int = 8000) -> Expiry:
        """Kills the broker's process while delay queues expire, starts it again, and shows what arrived, by kind of queue and of dead-lettering.

        messages: how many are published to the delay queues of each kind; with few of them the kill may miss the expiry, which is then told
        For a lab with private=True, while none of its runs is under way. Raises PlanError or BrokerError.
        """
        return self._with_a_kill(expire, messages)

    def measure_delays(self, plan: Iterable[tuple[int, str]], arrangement: str = ONE_EACH, queue_type: str = "quorum") -> dict[str, float]:
        """Publishes (delay in ms, name) pairs to delay queues, and returns name -> ms until each came back to the work queue, in the order of coming.

        arrangement: "one queue per delay", or "one queue", in which each message brings its own delay
        Raises PlanError or BrokerError.
        """
        self._check_open()
        self._runs += 1
        return measure(self.broker, self._prefix, self._runs, plan, arrangement, queue_type)

    @property
    def provider(self) -> Provider:
        """The dependency outside, which handlers call by `shop.provider`: tell it how to behave, and ask what it did."""
        self._check_open()
        return self._provider

    def show(self, verb: str) -> "Plain":
        """Shows what a labkit verb is in plain pika or SQL."""
        from labkit.plain import Plain
        return Plain(verb)

    def queue(self, word: str) -> str:
        """Returns a name for a queue of your own, that nobody else uses: declare it, and delete it, in plain pika."""
        return topology.own_queue(self._prefix, word)

    def close(self) -> None:
        """Ends the runs under way and the workers, and gives the broker back; safe to call twice."""
        atexit.unregister(self.close)
        if self._crew and os.getpid() == self._process:                       # in a fork of the kernel it is not ours to close
            for live in list(self._under_way):
                live.end()
            self._provider.close()
            self._crew.close()
            self._crew = None
            if self._session:
                controller.loop().call_soon_threadsafe(self._session.close)
            try:
                self._home.close()
            finally:
                shutil.rmtree(self._folder, ignore_errors=True)
                if not self._borrowed:
                    self.broker.release()

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Lab on {self.broker}>"

    def _begin(self, handler: Callable, messages: Iterable[Message], **arguments: Any) -> Live:
        return self._start(Plan(handler, messages, self._ledger(arguments.pop("continue_from", None)), **arguments), Consuming)

    def _start(self, plan: Any, kind: type[Supervisor]) -> Live:
        if self._address.tls and any(fault.kind == "lose" for fault in plan.faults):
            raise PlanError("Nothing can be lost on the way to this broker.", "the connection is encrypted, so the relay cannot read it",
                            "Use a broker on this machine, without TLS.")
        live = Live(plan, self._supervise(plan, kind))
        self._under_way.add(live)
        return live

    async def _open(self) -> None:
        self._session = await Session.open(self._address, ANSWER_S)
        self._crew = Crew(self._address, type(self._home).__module__)
        self._crew.refill()

    async def _supervise(self, plan: Any, kind: type[Supervisor]):
        answer_s = min(plan.deadline_s, ANSWER_S)
        if not self._session.usable:
            self._session = await Session.open(self._address, answer_s)
        channel = await self._session.channel(answer_s)
        self._runs += 1
        supervisor = kind(plan, self._crew, channel, self._address, self._prefix, self._runs, self.broker.version)
        supervisor.tab = Tab(self._provider)
        return supervisor

    def _with_a_kill(self, experiment: Callable, messages: int) -> Any:
        self._check_open()
        positive("messages", messages, int)
        if any(not live.done for live in self._under_way):
            raise PlanError("A run of this lab is under way.", "a killed broker would end it", "Wait for it: live.wait().")
        self._runs += 1
        return experiment(self.broker, self._prefix, self._runs, messages)

    def _check_open(self) -> None:
        if self._crew is None:
            raise PlanError("This lab is closed.", "`lab.close()` was called", "Make a new one: lab = Lab().")

    def _ledger(self, continue_from: Run | None) -> Any:
        self._check_open()
        if continue_from is None:
            return self._home.new()
        why = "continue_from is no run"
        if isinstance(continue_from, Run) and continue_from.ledger:
            try:
                return self._home.new(continue_from.ledger)
            except LedgerError as error:
                why = f"its lab was closed, which removes it, or it is away ({error.why})"
        raise PlanError("There is no ledger to go on with.", why, "Use a run of a lab that is open, or one that was saved: Run.load(folder).")


def _check(verb: str, given: dict[str, Any], **planned: str) -> None:
    """Raises PlanError for an argument that `verb` does not take; `planned` tells which of those of `run` these are, and why."""
    for name in given:
        methods = (getattr(Lab, verb), Lab.run) if verb != "produce" else (Lab.produce,)
        known = dict.fromkeys(argument for method in methods for argument, parameter in inspect.signature(method).parameters.items()
                              if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) and argument not in ("self", "handler", "producer", "message", "messages", *planned))
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise PlanError(f"lab.{verb} has no argument {name!r}.", planned.get(name) or (f"perhaps {near[0]!r} is meant" if near else "a misspelt name"),
                            "The arguments are: " + ", ".join(known) + ".")
