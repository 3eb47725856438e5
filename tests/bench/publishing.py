"""What safety costs a producer, and what its lack costs at a cut connection: four ways to publish the same orders, side by side."""

from labkit import Lab, Message, lose, publish_outbox

ORDERS, BATCH = 1_000, 100


def place(shop, number: int) -> Message:
    """Commits one order, and returns its event."""
    shop.ledger.record(f"order-{number}")
    return Message(f"order-{number}", str(number))


def confirm_each(shop):
    for number in range(ORDERS):
        shop.publish(place(shop, number))


def confirm_in_batches(shop):
    for start in range(0, ORDERS, BATCH):
        for number in range(start, start + BATCH):
            shop.publish(place(shop, number), confirm=False)
        shop.confirm()


def no_confirm(shop):
    for number in range(ORDERS):
        shop.publish(place(shop, number), confirm=False)


def with_outbox(shop):
    for number in range(ORDERS):
        with shop.ledger.transaction():
            shop.outbox.add(place(shop, number))


def main(database: str, lab: Lab) -> None:
    """(5): events a second, from the first step to the last; then the same again with a connection that is cut in the middle."""
    print(f"(5) {ORDERS} orders and their events on {database}:")
    for producer, relay in ((confirm_each, None), (confirm_in_batches, None), (no_confirm, None), (with_outbox, publish_outbox)):
        whole = lab.produce(producer, relay=relay, deadline_s=60)
        assert whole.counts["orders"] == whole.counts["events"] == ORDERS, whole
        took_s = (whole.events[-1].at_ms - whole.events[0].at_ms) / 1000
        cut = lab.produce(producer, relay=relay, deadline_s=60, faults=[lose.publish(message=str(ORDERS // 2))])
        assert cut.facts.fired == [1], cut
        unknown = sum(event.name == "confirm" and "unknown" in str(event.detail.get("outcome")) for event in cut.events)
        print(f"    {producer.__name__:20}{ORDERS / took_s:6.0f}/s; connection cut: {cut.counts['lost']:3} lost, {cut.counts['repeated']:3} repeated, "
              f"{unknown} times told that the outcome is unknown")
