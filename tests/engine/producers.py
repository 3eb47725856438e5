"""The producers and relays that several tests hand to the lab: right ones and wrong ones, named by what they do."""
import os

from labkit import Message, hang

ORDER = "order-1"


def commit_first(shop):
    with shop.ledger.transaction():
        shop.ledger.record("order-1")
    print(shop.publish(Message("order-1")))


def publish_first(shop):
    shop.publish(Message("order-1"))
    with shop.ledger.transaction():
        shop.ledger.record("order-1")


def with_outbox(shop):
    with shop.ledger.transaction():
        shop.ledger.record("order-1")
        shop.outbox.add(Message("order-1"))


def three_orders(shop):
    for number in (1, 2, 3):
        with shop.ledger.transaction():
            shop.ledger.record(f"order-{number}")
            shop.outbox.add(Message(f"order-{number}"))


def one_order_each(shop):
    with shop.ledger.transaction():
        shop.ledger.record(f"order-{os.getpid()}")
        shop.outbox.add(Message(f"order-{os.getpid()}"))


def by_last_id(shop):
    """A relay that remembers how far it came, and marks nothing."""
    shop.ledger.execute("CREATE TABLE IF NOT EXISTS progress (last INTEGER)")
    last, = shop.ledger.execute("SELECT coalesce(max(last), 0) FROM progress")[0]
    for number, key, message_id in shop.ledger.execute("SELECT id, effect_key, message_id FROM outbox WHERE id > ? ORDER BY id", (last,)):
        shop.publish(Message(key, message_id))
        shop.ledger.execute("INSERT INTO progress (last) VALUES (?)", (number,))


def late_commit(lab, relay):
    """Returns a run in which the event with the lower id became durable last, while a relay was at work; two producers get there in some tries."""
    for _ in range(20):
        run = lab.produce(one_order_each, relay=relay, producers=2, relay_starts="beside", faults=[hang.at("ledger.commit", worker="producer", seconds=0.3)])
        late = next(event.lane for event in run.events if event.name == "stopped")
        late_key = next(event.effect_key for event in run.events if event.lane == late and event.name == "outbox.add")
        if run.query("SELECT effect_key FROM outbox ORDER BY id")[0] == (late_key,):
            assert run.facts.fired == [1]
            return run
