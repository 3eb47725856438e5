"""The kernel's own channel to the broker: what one run leaves on it does not reach the next."""
import asyncio

from labkit import controller, topology


def test_a_run_that_ends_while_an_answer_is_on_its_way_leaves_its_channel_to_nobody(lab):
    """pika holds back a declaration until that answer has come, and publishes at once: the next run's messages would come back."""
    def queues(word):
        dead = lab.queue(f"{word}-dead")
        return {dead: topology.dead_arguments(), lab.queue(word): topology.work_arguments("quorum", dead, None)}

    async def two_runs():
        first, second, outcomes = queues("first"), queues("second"), []
        channel = await lab._session.channel()
        await channel.declare(first)
        channel.consume(next(iter(first)), print)
        channel.give_back(*first)
        channel = await lab._session.channel()
        await asyncio.gather(channel.declare(second), channel.publish(list(second)[1], [(1, lab.reminders(1)[0])], lambda *outcome: outcomes.append(outcome)))
        await asyncio.sleep(0)                        # outcomes are told in the next turn of the loop
        channel.give_back(*second)
        return outcomes
    assert controller.carry_out(two_runs()) == [(1, "confirmed")]
