"""Transactions that a handler opens, nests, ends or forgets by itself: the same on SQLite and on PostgreSQL."""
from contextlib import suppress

import pytest

from labkit import LedgerError, hang
from tests.engine.handlers import effect_then_ack, once_then_ack


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
    assert "transaction was left open, and was undone" in run.facts.errors[0]
    assert run.query("SELECT effect_key FROM effects") == [("invoice-2:reminder",)]
    assert (run.counts["lost"], run.counts["once"]) == (1, 1)


def lose_it_and_go_on(lose):
    def handler(delivery, shop):
        shop.ledger.execute("BEGIN")
        shop.ledger.record(delivery.message.effect_key)
        for statement in (lose, "INSERT INTO effects (effect_key, detail) VALUES ('by hand', '{}')", "COMMIT"):
            try:
                shop.ledger.execute(statement)
            except Exception as error:
                print(type(error).__name__, end=" ")
        with suppress(LedgerError):
            shop.ledger.record_once("once")
        delivery.ack()
    return handler


def lose_it_inside(lose):
    def handler(delivery, shop):
        with suppress(LedgerError), shop.ledger.transaction():
            shop.ledger.record("first")
            with suppress(Exception):
                shop.ledger.execute(lose)
            shop.ledger.record("second")
        once_then_ack(delivery, shop)
    return handler


@pytest.fixture
def lose(either):
    """A statement by which the transaction is undone: SQLite does it on demand, PostgreSQL when the connection ends."""
    return "INSERT OR ROLLBACK INTO effects (id) VALUES (1)" if "path" in either.run(once_then_ack, []).ledger.wire else \
        "SELECT pg_terminate_backend(pg_backend_pid())"


def test_what_follows_a_lost_transaction_does_not_become_durable_by_itself(either, lose):
    run = either.run(lose_it_and_go_on(lose), either.reminders(1))
    assert run.facts.printed.split()[1:] == ["LedgerError", "LedgerError"]
    assert run.query("SELECT * FROM effects") == [] and run.counts["lost"] == 1
    assert "transaction was left open, and was undone" in run.facts.errors[0]


def test_after_the_with_block_of_a_lost_transaction_the_handler_may_go_on(either, lose):
    run = either.run(lose_it_inside(lose), either.reminders(2))
    assert (run.verdict, run.counts["once"], run.counts["stray"], run.facts.errors) == ("holds", 2, 0, [])


def fail_and_begin_anew(delivery, shop):
    for key in (None, delivery.message.effect_key):
        shop.ledger.execute("BEGIN")
        with suppress(Exception):
            shop.ledger.execute("INSERT INTO effects (effect_key, detail) VALUES (?, '{}')", (key,))
        with suppress(Exception):
            shop.ledger.execute("COMMIT")
    delivery.ack()


def test_a_commit_that_fails_ends_the_transaction_too(either):
    run = either.run(fail_and_begin_anew, either.reminders(1))
    assert (run.verdict, run.counts["once"], run.facts.errors) == ("holds", 1, [])


# -- how it is told

def outcomes(run):
    return [row["outcome"] for row in run.trail("invoice-1:reminder").rows if row["what"] == "ledger.record"]


def by_hand(delivery, shop):
    for statement in ("begin", "SAVEPOINT here", "ROLLBACK TO here", "Commit"):
        shop.ledger.execute(statement)
        shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def test_the_trail_knows_a_transaction_by_hand_from_its_begin_to_its_end(either):
    run = either.run(by_hand, either.reminders(1))
    assert outcomes(run) == ["recorded, not committed yet"] * 3 + ["recorded"]
    assert "ledger.commit: recorded again; ledger.record: recorded again; ack" in repr(run.trail("invoice-1:reminder").plot())


def test_what_was_left_open_is_not_told_as_recorded_by_a_later_commit(either):
    def forget_first(delivery, shop):
        shop.ledger.execute("BEGIN")
        shop.ledger.record(delivery.message.effect_key)
        if delivery.attempt == 1:
            return delivery.nack(requeue=True)
        shop.ledger.execute("COMMIT")
        delivery.ack()
    run = either.run(forget_first, either.reminders(1))
    assert (run.verdict, outcomes(run)) == ("holds", ["recorded, not committed yet"] * 2)
    assert "ledger.commit: recorded;" in repr(run.trail("invoice-1:reminder").plot())


def record_once_more(delivery, shop):
    if delivery.attempt == 1:
        shop.ledger.execute("BEGIN")
    shop.ledger.record(delivery.message.effect_key)
    delivery.nack(requeue=True) if delivery.attempt == 1 else delivery.ack()


def test_what_is_written_after_one_that_was_left_open_is_told_as_recorded(either):
    assert outcomes(either.run(record_once_more, either.reminders(1))) == ["recorded, not committed yet", "recorded"]


def ack_inside(delivery, shop):
    shop.ledger.execute("BEGIN IMMEDIATE")
    effect_then_ack(delivery, shop)


def test_a_worker_that_hangs_in_a_transaction_by_hand_is_told_to_hold_the_lock(lab):
    run = lab.run(ack_inside, lab.reminders(1), faults=[hang.at("ack")], deadline_s=600)
    assert run.why.endswith(" while worker 1, frozen inside a transaction, held the ledger's lock")


def test_a_rollback_by_hand_is_told_as_one(either):
    def write_none(delivery, shop):
        with shop.ledger.transaction():
            shop.ledger.record(delivery.message.effect_key)
            shop.ledger.execute("ROLLBACK")
    run = either.run(write_none, either.reminders(1))
    assert "ledger.rollback; ledger.commit: failed" in repr(run.trail("invoice-1:reminder").plot())
