"""Every step that is declared is passed, before and after."""
from labkit import STEPS, Message, RetryPolicy


def every_step(delivery, shop):
    """Gives each message back once; then refuses the first reminder, has the third tried again, and handles the second with all that the shop can do."""
    key = delivery.message.effect_key
    if delivery.attempt == 1:
        shop.ledger.find(key)
        shop.ledger.execute("SELECT count(*) FROM effects")
        delivery.nack(requeue=True)
    elif key == "invoice-3:reminder":
        delivery.retry("busy")
    elif key == "invoice-1:reminder":
        delivery.reject()
    else:
        try:
            with shop.ledger.transaction():
                shop.ledger.record(key)
                raise LookupError
        except LookupError:
            pass
        with shop.ledger.transaction():
            shop.ledger.remember(delivery.message.message_id)
        shop.provider.charge(key)
        shop.ledger.record_once(key)
        shop.status.move("invoice-2", "new", "reminded")
        shop.outbox.add(Message(f"{key}:sent"))
        for event in shop.outbox.waiting():
            shop.publish(event)
            shop.outbox.mark(event)
        delivery.ack()


def test_every_step_is_passed_before_and_after(lab):
    run = lab.run(every_step, lab.reminders(3), retry=RetryPolicy(delays_ms=(1,), jitter=0))
    for phase in ("before", "after"):
        assert {event.name for event in run.events if event.phase == phase} == set(STEPS)
    assert (run.verdict, run.statuses) == ("holds", {"invoice-1:reminder": "terminal", "invoice-2:reminder": "once", "invoice-3:reminder": "terminal"})
