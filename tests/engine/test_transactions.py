"""Transactions that a handler opens, nests, ends or forgets by itself: the same on SQLite and on PostgreSQL."""
import pytest

from tests.engine.handlers import once_then_ack


def nest(delivery, shop):
    with shop.ledger.transaction():
        shop.ledger.record(delivery.message.effect_key)
        with shop.ledger.transaction():
            shop.ledger.record("inside")
    delivery.ack()


def begin_inside(delivery, shop):
    with shop.ledger.transaction():
        shop.ledger.record(delivery.message.effect_key)
        shop.ledger.execute("begin;")
    delivery.ack()


def roll_back_inside(delivery, shop):
    with shop.ledger.transaction():
        shop.ledger.record(delivery.message.effect_key)
        shop.ledger.execute("ROLLBACK")
    delivery.ack()


def roll_back_outside(delivery, shop):
    shop.ledger.execute(" rollback")
    delivery.ack()


def commit_outside(delivery, shop):
    shop.ledger.execute("END")
    delivery.ack()


@pytest.mark.parametrize("handler, told", [
    (nest, "cannot start a transaction within a transaction"), (begin_inside, "cannot start a transaction within a transaction"),
    (roll_back_inside, "cannot commit - no transaction is active"), (roll_back_outside, "cannot rollback - no transaction is active"),
    (commit_outside, "cannot commit - no transaction is active")])
def test_a_transaction_that_is_nested_or_not_there_is_an_error_and_writes_nothing(either, handler, told):
    run = either.run(handler, either.reminders(1))
    assert told in run.facts.errors[0]
    assert (run.counts["effects"], run.counts["stray"], run.counts["terminal"]) == (0, 0, 1)
    assert not [event for event in run.events if event.name == "ack"]


def commit_inside(delivery, shop):
    with shop.ledger.transaction():
        shop.ledger.record(delivery.message.effect_key)
        shop.ledger.execute("commit")
    delivery.ack()


def test_a_commit_by_hand_ends_the_transaction_so_that_its_end_is_an_error(either):
    run = either.run(commit_inside, either.reminders(1))
    assert "cannot commit - no transaction is active" in run.facts.errors[0]
    assert (run.counts["effects"], run.counts["dead_lettered"]) == (1, 1)


def back_to_a_savepoint(delivery, shop):
    with shop.ledger.transaction():
        shop.ledger.execute("SAVEPOINT before")
        shop.ledger.record("not this")
        shop.ledger.execute("ROLLBACK TO before")
        shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def test_a_savepoint_is_no_end_of_the_transaction(either):
    run = either.run(back_to_a_savepoint, either.reminders(1))
    assert (run.verdict, run.counts["once"], run.facts.errors) == ("holds", 1, [])
    stepped = either.race(back_to_a_savepoint, either.reminders(1)[0], limit=1).schedules[0].run
    assert (stepped.counts["stray"], stepped.counts["effects"], stepped.facts.errors) == (0, 2, [])


def begin_and_forget(delivery, shop):
    if delivery.message.effect_key == "invoice-1:reminder":
        shop.ledger.execute("BEGIN")
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    else:
        once_then_ack(delivery, shop)


def test_a_transaction_that_is_left_open_is_undone_and_told_and_the_next_delivery_is_free_of_it(either):
    run = either.run(begin_and_forget, either.reminders(2))
    assert "left a transaction open, which was undone" in run.facts.errors[0]
    assert run.query("SELECT effect_key FROM effects") == [("invoice-2:reminder",)]
    assert (run.counts["lost"], run.counts["once"]) == (1, 1)
