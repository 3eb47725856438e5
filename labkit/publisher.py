"""The publisher of one run: declares its queues, publishes its messages, and hears of its dead letters."""

import asyncio
import time
from collections.abc import Callable

from labkit import topology
from labkit.amqp import Channel
from labkit.errors import BrokerError
from labkit.message import copy_of
from labkit.plan import Plan


class Publisher:
    """Publishes what is planned, all of it first or beside the workers. `done`: each message has its outcome."""

    def __init__(self, plan: Plan, channel: Channel, prefix: str, number: int, note: Callable[..., None], on_trouble: Callable[[BrokerError], None]):
        """note(name, lane, detail, **about) writes an event; on_trouble(error) is told of a message that could not be published."""
        self.work, self.dead, self.done = topology.work_queue(prefix, number), topology.dead_queue(prefix, number), False
        self.events = topology.events_queue(prefix, number)
        self._plan, self._channel, self._note, self._on_trouble = plan, channel, note, on_trouble

    async def open(self) -> None:
        """Returns when the queues are there and what goes first is published. Raises BrokerError when that takes too long."""
        plan, channel = self._plan, self._channel
        queues = {self.dead: topology.dead_arguments()} if plan.dead_letter else {}
        queues[self.work] = topology.work_arguments(plan.queue_type, plan.dead_letter and self.dead, plan.delivery_limit)
        first = list(enumerate(plan.messages, 1)) if plan.publish == "first" else []
        limit_s = plan.deadline_s + len(first) / 500
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.gather(channel.declare(queues), channel.publish(self.work, first, self._take_outcome))
        except TimeoutError:
            raise BrokerError(f"RabbitMQ did not take the messages within {limit_s:.0f} s.",
                              f"it has blocked publishers: {channel.blocked}" if channel.blocked else "it is frozen, or overloaded",
                              "Free memory or disk space on its machine, then run the cell again." if channel.blocked else
                              "Run `python3 -m labkit doctor`, then run the cell again.") from None
        if plan.dead_letter:
            channel.consume(self.dead, self._take_dead_letter)
        self.done = plan.publish == "first"

    async def publish_beside(self) -> None:
        """Publishes one message after the other, `rate` a second, or as fast as each is confirmed."""
        begun = time.monotonic()
        for position, message in enumerate(self._plan.messages, 1):
            if self._plan.rate:
                await asyncio.sleep(begun + (position - 1) / self._plan.rate - time.monotonic())
            await self._channel.publish(self.work, [(position, message)], self._take_outcome)
        self.done = True

    def close(self, *more: str) -> None:
        """Removes the queues, and `more`, which workers have declared, and gives the channel back."""
        self._channel.give_back(self.work, *[self.dead] * self._plan.dead_letter, *more)

    def _take_outcome(self, position: int, outcome: str) -> None:
        if outcome == "confirmed":
            message = self._plan.messages[position - 1]
            self._note("published", "broker", position=position, message_id=message.message_id, effect_key=message.effect_key)
        else:
            self._on_trouble(BrokerError(f"RabbitMQ {outcome} message {position}.", "the run's queue is gone, or full",
                                         "Run the cell again; if it stays, run `python3 -m labkit doctor`."))

    def _take_dead_letter(self, message_id: str, headers: dict) -> None:
        reason = next((death["reason"] for death in headers.get("x-death", ()) if death["queue"] == self.work), "unknown")
        position, copy = copy_of(headers)
        position = self._plan.known(position)
        self._note("dead-lettered", "broker", {"reason": reason, **({"copy": copy} if copy else {})}, position=position, message_id=message_id,
                   effect_key=position and self._plan.messages[position - 1].effect_key)
