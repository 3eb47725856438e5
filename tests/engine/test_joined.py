"""Several runs, joined by one correlation id."""
import pytest

from labkit import Message, PlanError, crash, hops, publish_outbox


def letter(delivery, shop):
    shop.ledger.record_once(delivery.message.effect_key)
    shop.publish(Message(f"{delivery.message.effect_key}:sent", correlation_id=delivery.message.correlation_id))
    delivery.ack()


def book(delivery, shop):
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.ack()


def order(shop):
    with shop.ledger.transaction():
        shop.ledger.record("invoice-1:reminder")
        shop.outbox.add(Message("invoice-1:reminder", correlation_id="case-1"))


def test_one_correlation_id_joins_producer_and_two_consumers(lab):
    ordered = lab.produce(order, relay=publish_outbox)
    first = lab.run(letter, ordered.published, faults=[crash.before("ack")])
    second = lab.run(book, first.published)
    joined = hops("case-1", ordered, first, second)
    assert list(dict.fromkeys((row["hop"], row["effect key"]) for row in joined.rows)) == [
        ("order", "invoice-1:reminder"), ("letter", "invoice-1:reminder"), ("book", "invoice-1:reminder:sent")]
    assert [(row["hop"], row["attempt"]) for row in joined.rows if row["what"] == "receive"] == [("letter", 1), ("letter", 2), ("book", 1), ("book", 2)]
    assert second.counts["effects"] == 1
    assert repr(joined).startswith("case-1: 3 hops\nhop ") and "invoice-1:reminder:sent" in joined._repr_html_()


def test_an_id_that_no_run_knows_is_refused_with_those_that_are_known(lab):
    with pytest.raises(PlanError, match="reminder-1, reminder-2"):
        hops("case-7", lab.run(book, lab.reminders(2)))
