"""What the ledger promises on SQLite and on PostgreSQL alike, and what becomes of a run when its database is away."""
import json
import os
import sqlite3
import subprocess
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from labkit import HandlerError, Lab, LedgerError, Message, PlanError, Run, crash, fail
from tests import postgres
from tests.engine.handlers import effect_then_ack, once_then_ack


def effect_and_key_together(delivery, shop):
    with shop.ledger.transaction():
        if shop.ledger.remember(delivery.message.message_id) == "new":
            shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


@pytest.mark.parametrize("handler", [once_then_ack, effect_and_key_together])
def test_eight_writers_at_once_lose_nothing_and_are_not_turned_away(either, handler):
    run = either.run(handler, either.reminders(400), workers=8, prefetch=10)
    assert (run.verdict, run.counts["once"], run.facts.errors) == ("holds", 400, [])


def test_eight_workers_that_hold_copies_of_one_message_number_its_attempts_from_one_up(either):
    run = either.run(once_then_ack, [Message("invoice-1:reminder", "m-1")] * 40, workers=8, max_deliveries=40)
    assert run.query("SELECT attempt FROM deliveries ORDER BY attempt") == [(number,) for number in range(1, 41)]
    assert (run.verdict, run.counts["effects"]) == ("holds", 1)


def test_a_transaction_of_a_killed_worker_leaves_nothing(either):
    sweep = either.sweep(effect_and_key_together, either.reminders(1))
    assert (sweep.verdict, sweep.counts["once"], len(sweep.rows)) == ("holds", 12, 13)


def test_the_transaction_is_undone_when_its_body_raises(either):
    def raise_inside(delivery, shop):
        with shop.ledger.transaction():
            shop.ledger.record_once(delivery.message.effect_key)
            raise ValueError("no address")
    run = either.run(raise_inside, either.reminders(1))
    assert (run.counts["effects"], run.query("SELECT * FROM effect_keys")) == (0, [])


def swallow_an_error_inside(delivery, shop):
    with shop.ledger.transaction():
        shop.ledger.record(delivery.message.effect_key)
        try:
            shop.ledger.execute("INSERT INTO inbox (consumer, message_id) VALUES (?, ?)", ("a", "b"))
            shop.ledger.execute("INSERT INTO inbox (consumer, message_id) VALUES (?, ?)", ("a", "b"))
        except Exception:
            pass
    delivery.ack()


def test_a_transaction_that_postgresql_has_given_up_is_no_success(broker):
    with Lab(broker=broker, quiet=True, ledger=postgres.url()) as lab:
        run = lab.run(swallow_an_error_inside, lab.reminders(1))
    assert run.counts["effects"] == 0 and run.counts["terminal"] == 1
    assert "an earlier statement of this transaction failed" in run.facts.errors[0]
    assert "ledger.commit: failed" in repr(run.trail("invoice-1:reminder").plot())


def test_another_payload_under_the_same_key_is_kept_apart_and_the_first_effect_stands(either):
    def tell(delivery, shop):
        print(outcome := shop.ledger.record_once(delivery.message.effect_key))
        delivery.reject() if outcome == "conflict" else delivery.ack()
    first, other = (Message("invoice-1:reminder", f"m-{amount}", payload={"amount": amount}) for amount in (10, 20))
    run = either.run(tell, [first, first, other, other])
    assert run.facts.printed.split() == ["recorded", "duplicate", "conflict", "conflict"]
    assert run.query("SELECT effect_key, message_id FROM conflicts") == [("invoice-1:reminder", "m-20")]
    assert (run.verdict, run.counts["effects"], run.counts["dead_lettered"]) == ("holds", 1, 2)


@pytest.mark.parametrize("kept, effects", [(None, 4), (4, 4), (3, 8), (1, 8)])
def test_a_key_that_was_forgotten_protects_nothing(either, kept, effects):
    run = either.run(once_then_ack, either.reminders(4) * 2, forget_after=kept)
    assert run.counts["effects"] == effects
    assert run.query("SELECT count(*) FROM effect_keys") == [(kept or 4,)]


def test_a_key_that_another_worker_forgets_meanwhile_is_no_conflict(either):
    messages = [Message(f"invoice-{number % 3}:reminder", f"m-{number}") for number in range(600)]
    run = either.run(once_then_ack, messages, workers=6, prefetch=20, forget_after=1)
    assert {event.detail["outcome"] for event in run.events if (event.name, event.phase) == ("ledger.record_once", "after")} == {"recorded", "duplicate"}
    assert (run.query("SELECT * FROM conflicts"), run.facts.errors) == ([], [])


def test_a_status_moves_from_the_expected_one_only(either):
    def move(delivery, shop):
        for expected, to in (("new", "paid"), ("new", "paid"), ("new", "cancelled"), ("paid", "shipped")):
            print(shop.status.move("order-1", expected, to), end="; ")
        delivery.ack()
        shop.ledger.record(delivery.message.effect_key)
    run = either.run(move, either.reminders(1))
    assert run.facts.printed == "moved; already paid; refused: it is paid; moved; "
    assert run.query("SELECT * FROM statuses") == [("order-1", "shipped")]


def test_a_move_inside_a_transaction_is_undone_with_it(either):
    def ship(delivery, shop):
        with shop.ledger.transaction():
            if shop.status.move("order-1", "new", "shipped") == "moved":
                shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    sweep = either.sweep(ship, either.reminders(1))
    assert (sweep.verdict, sweep.counts["once"]) == ("holds", len(sweep.rows) - 1)


def try_names_that_are_no_text(delivery, shop):
    ledger, move = shop.ledger, shop.status.move
    tries = {"effect_key is 5": lambda: ledger.record(5), "effect_key is b'x'": lambda: ledger.record_once(b"x"), "effect_key is None": lambda: ledger.find(None),
             "message_id is 5": lambda: ledger.remember(5), "entity is 5": lambda: move(5, "new", "paid"), "expected is 1": lambda: move("a", 1, "paid"),
             "to is None": lambda: move("a", "new", None)}
    for told, what in tries.items():
        try:
            what()
        except HandlerError as error:
            assert told in str(error)
        else:
            raise AssertionError(told)
    once_then_ack(delivery, shop)


def test_a_key_an_entity_or_an_id_that_is_no_text_is_refused_before_anything_is_done(either):
    run = either.run(try_names_that_are_no_text, either.reminders(1))
    assert (run.verdict, run.facts.errors) == ("holds", [])
    assert [event.name for event in run.events if event.phase == "before"] == ["receive", "ledger.record_once", "ack"]
    assert run.query("SELECT * FROM statuses UNION SELECT * FROM inbox") == []


def test_more_keys_than_a_database_can_count_are_refused(either):
    assert either.run(once_then_ack, either.reminders(1), forget_after=2 ** 63 - 1).verdict == "holds"
    with pytest.raises(PlanError, match="the databases count up to"):
        either.run(once_then_ack, either.reminders(1), forget_after=2 ** 63)


def test_a_run_goes_on_with_all_tables_of_an_earlier_one(either):
    def count(delivery, shop):
        shop.ledger.execute("CREATE TABLE IF NOT EXISTS visits (place TEXT, n INTEGER)")
        shop.ledger.execute("INSERT INTO visits VALUES ('here?', ?)", (1,))
        once_then_ack(delivery, shop)
    run = either.run(count, either.reminders(2))
    again = either.run(count, either.reminders(3), continue_from=run)
    assert again.query("SELECT count(*) FROM visits WHERE place = 'here?'") == [(5,)]
    assert (run.counts["effects"], again.counts["effects"], again.query("SELECT max(id) FROM effects")) == (2, 3, [(3,)])
    assert run.query("SELECT count(*) FROM visits") == [(2,)]


def test_a_saved_run_takes_its_ledger_along(either, tmp_path):
    run = either.run(once_then_ack, either.reminders(2))
    loaded = Run.load(run.save(tmp_path / "run"))
    assert loaded.query("SELECT effect_key FROM effects ORDER BY id") == [("invoice-1:reminder",), ("invoice-2:reminder",)]
    assert loaded.query("SELECT message_id, attempt FROM deliveries ORDER BY 1") == [("reminder-1", 1), ("reminder-2", 1)]


def keep_values_of_many_types(delivery, shop):
    shop.ledger.execute("ALTER TABLE effects ADD COLUMN price numeric")
    shop.ledger.execute("CREATE TABLE parcels (weight numeric, address jsonb, at timestamptz, label bytea, there boolean)")
    shop.ledger.execute("INSERT INTO parcels VALUES (1.50, ?, '2026-01-02 03:04:05+00', ?, true)", ('{"city": "Köln"}', b"\x00\xff"))
    shop.ledger.execute("INSERT INTO effects (effect_key, detail, price) VALUES (?, '{}', 9.90)", (delivery.message.effect_key,))
    delivery.ack()


def test_a_saved_run_from_postgresql_loads_with_tables_columns_and_types_of_ones_own(broker, tmp_path):
    with Lab(broker=broker, quiet=True, ledger=postgres.url()) as lab:
        loaded = Run.load(lab.run(keep_values_of_many_types, lab.reminders(1)).save(tmp_path / "run"))
    assert (loaded.verdict, loaded.query("SELECT effect_key, price FROM effects")) == ("holds", [("invoice-1:reminder", "9.90")])
    (weight, address, at, label, there), = loaded.query("SELECT * FROM parcels")
    assert (weight, json.loads(address), at[:19], label, there) == ("1.50", {"city": "Köln"}, "2026-01-02 03:04:05", b"\x00\xff", 1)


def test_runs_that_two_threads_start_at_once_have_a_ledger_each(either):
    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(lambda n: either.run(once_then_ack, either.reminders(n)), [3, 4, 5, 6]))
    assert [(run.verdict, run.counts["effects"]) for run in runs] == [("holds", 3), ("holds", 4), ("holds", 5), ("holds", 6)]


def test_a_query_changes_nothing(either):
    run = either.run(once_then_ack, either.reminders(1))
    with pytest.raises((sqlite3.OperationalError, psycopg.Error)):
        run.query("DELETE FROM effects")
    assert run.query("SELECT count(*) FROM effects") == [(1,)]


# -- away

def test_a_ledger_that_is_away_for_a_while_costs_a_delivery_and_no_effect(either):
    run = either.run(once_then_ack, either.reminders(1), faults=[fail("receive", LedgerError("The ledger is away."), times=2)])
    assert (run.verdict, run.counts["effects"], run.counts["once"]) == ("holds", 1, 1)


def test_a_ledger_that_stays_away_has_no_ack_and_the_delivery_ends_with_a_person(either):
    run = either.run(once_then_ack, either.reminders(1), delivery_limit=3, faults=[fail("receive", LedgerError("The ledger is away."), times=50)])
    returned = sum(event.name == "raised" for event in run.events)
    assert (run.counts["effects"], run.counts["terminal"], returned) == (0, 1, 4)
    assert not [event for event in run.events if event.name == "ack"]


def lose_the_file(delivery, shop):
    once_then_ack(delivery, shop)
    os.remove(shop.ledger.execute("PRAGMA database_list")[0][2])


def test_without_its_file_nothing_more_is_acked_and_the_run_is_unknown(lab):
    run = lab.run(lose_the_file, lab.reminders(3), delivery_limit=2)
    assert [event.position for event in run.events if event.name == "ack" and event.phase == "after"] == [1]
    assert (run.verdict, run.counts["unknown"], run.counts["dead_lettered"]) == ("unknown", 3, 2)
    assert "The ledger is away" in run.facts.errors[0]


def spoil_the_file(delivery, shop):
    once_then_ack(delivery, shop)
    path = shop.ledger.execute("PRAGMA database_list")[0][2]
    for name in (path + "-wal", path):
        with open(name, "r+b") as file:
            file.write(b"garbage" * 2000)


def test_with_garbage_in_its_file_the_run_is_unknown_and_can_neither_be_asked_nor_gone_on_with(lab):
    run = lab.run(spoil_the_file, lab.reminders(3))
    assert (run.verdict, run.counts["unknown"]) == ("unknown", 3)
    with pytest.raises(LedgerError, match="The ledger is away"):
        run.query("SELECT * FROM effects")
    with pytest.raises(PlanError, match="no ledger to go on with"):
        lab.run(once_then_ack, lab.reminders(1), continue_from=run)


@pytest.fixture
def server_of_its_own():
    server = postgres.another()
    yield server
    server.remove()


def test_without_its_server_nothing_more_is_acked_and_the_run_is_unknown(lab, server_of_its_own):
    command, options = server_of_its_own.stopping

    def lose_the_server(delivery, shop):
        once_then_ack(delivery, shop)
        subprocess.run(command, check=True, **options)
    with Lab(broker=lab.broker, quiet=True, ledger=server_of_its_own.url) as own:
        run = own.run(lose_the_server, own.reminders(3), delivery_limit=2)
        assert [event.position for event in run.events if event.name == "ack" and event.phase == "after"] == [1]
        assert (run.verdict, run.counts["unknown"], run.counts["dead_lettered"]) == ("unknown", 3, 2)
        assert "The ledger is away" in run.facts.errors[0]
        server_of_its_own.start()
        assert own.run(once_then_ack, own.reminders(2)).verdict == "holds"


def test_crash_is_no_word_for_sqlite_alone(either):
    run = either.run(effect_then_ack, either.reminders(2), faults=[crash.after("ledger.record", message=2)])
    assert (run.verdict, run.counts["duplicated"], run.counts["once"]) == ("broken", 1, 1)
