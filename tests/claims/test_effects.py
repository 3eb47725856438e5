"""The claims of chapter 3: effects that happen once. The same experiments as in the notebook, on every broker under test,
and those about the ledger on both databases."""
import itertools
import json
import uuid
from collections import Counter

import pika
import pytest

from labkit import LedgerError, Message, crash, fail, lose, plots
from labkit.databases import SqlitePlace
from tests.claims.counting import numbers
from tests.engine.handlers import look_inside, look_then_record, once_then_ack

INSERT_KEY = "INSERT INTO effect_keys (effect_key, fingerprint) VALUES (?, '')"
AWAY, SLOW = LedgerError("The ledger is away."), TimeoutError("the database is slow")


def remember_first(delivery, shop):
    if shop.ledger.remember(delivery.message.message_id) == "new":
        shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def effect_first(delivery, shop):
    if not shop.ledger.execute("SELECT 1 FROM inbox WHERE message_id = ?", (delivery.message.message_id,)):
        shop.ledger.record(delivery.message.effect_key)
        shop.ledger.remember(delivery.message.message_id)
    delivery.ack()


def together(delivery, shop):
    with shop.ledger.transaction():
        if shop.ledger.remember(delivery.message.message_id) == "new":
            shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def give_back(delivery, shop):
    try:
        answer = shop.ledger.record_once(delivery.message.effect_key)
    except (LedgerError, TimeoutError):
        return delivery.reject(requeue=True)
    print("letter" if answer == "recorded" else "duplicate effect suppressed")
    delivery.ack()


def set_paid(delivery, shop):
    shop.ledger.execute("UPDATE invoices SET status = 'paid'")
    delivery.ack()


def change_balance(delivery, shop):
    shop.ledger.execute("UPDATE invoices SET balance = balance + ?", (delivery.message.payload["amount"],))
    delivery.ack()


def change_state_and_balance(delivery, shop):
    change = delivery.message.payload
    with shop.ledger.transaction():
        answer = shop.status.move("payment-1", change["from"], change["to"])
        if answer == "moved":
            shop.ledger.execute("UPDATE invoices SET balance = balance + ?", (change["amount"],))
    print(answer)
    delivery.ack()


def letters(run):
    return run.facts.printed.count("letter")


def not_once(sweep):
    assert all(row.run.facts.fired == [1] * len(row.faults) for row in sweep.rows)
    return {row.point: row.status for row in sweep.rows if row.status != "once"}


@pytest.fixture
def letter(lab):
    return lab.reminders(1)[0]


BOOK = Message("payment-1:booking", payload={"from": "new", "to": "booked", "amount": -10})
REFUND = Message("payment-1:refund", payload={"from": "booked", "to": "refunded", "amount": 10})


@pytest.fixture
def opened(either):
    """A run after which the ledger holds an open invoice with a balance of 100."""
    def open_invoice(delivery, shop):
        shop.ledger.execute("CREATE TABLE invoices AS SELECT 'open' AS status, 100 AS balance")
    run = either.run(open_invoice, either.reminders(1), acknowledge="auto")
    assert run.query("SELECT status, balance FROM invoices") == [("open", 100)]
    return run


def balance(run):
    return run.query("SELECT balance FROM invoices")[0][0]


@pytest.mark.claim("I1")
def test_looking_first_and_writing_then_is_found_out_each_time_and_its_order_can_be_repeated(either, letter):
    for _ in range(3):
        race = either.race(look_then_record, letter, limit=12)
        assert race.verdict == "broken"
        assert race.first_broken.told == ["A finds nothing", "B finds nothing", "A records", "B records"]
        assert race.first_broken.run.counts["effects"] == 2
    again = race.first_broken.replay()
    assert (again.order, again.told, again.run.counts["effects"]) == (race.first_broken.order, race.first_broken.told, 2)


@pytest.mark.claim("I1")
def test_the_race_is_lost_in_36_of_62_orders_and_one_worker_alone_never_loses_it(either, letter):
    race = either.race(look_then_record, letter)
    assert (race.tried, race.total, race.counts["duplicated"], race.counts["once"]) == (62, 62, 36, 26)
    assert all((schedule.told[:2] in (["A finds nothing", "B finds nothing"], ["B finds nothing", "A finds nothing"])) == (schedule.status == "duplicated")
               for schedule in race.schedules)
    assert numbers(either.run(look_then_record, [letter, letter]), "published", "effects", "once") == (2, 1, 1)


@pytest.mark.claim("I1")
def test_looking_inside_a_transaction_is_safe_with_one_writer_and_not_at_read_committed(either, letter):
    one_writer = isinstance(either.run(once_then_ack, [letter]).ledger, SqlitePlace)
    race = either.race(look_inside, letter, limit=500 if one_writer else 20)
    if one_writer:
        assert (race.verdict, race.total, race.counts["once"]) == ("holds", 32, 32)
    else:
        assert race.verdict == "broken"
        assert race.first_broken.told == ["A begins", "B begins", "A finds nothing", "A records", "B finds nothing", "A commits", "B records", "B commits"]


@pytest.mark.claim("I2")
def test_a_unique_key_closes_the_race_in_each_order(either, letter):
    race = either.race(once_then_ack, letter)
    assert (race.verdict, race.tried, race.total, race.counts["once"]) == ("holds", 20, 20, 20)
    answers = Counter(tuple(sorted(step.split(" ", 1)[1] for step in schedule.told)) for schedule in race.schedules)
    assert answers == {("finds a duplicate", "records"): 20}


@pytest.mark.claim("I2")
def test_a_conflict_that_is_tried_again_never_ends_and_one_that_an_upsert_hides_is_a_second_effect(either, letter):
    def conflict_is_an_error(delivery, shop):
        try:
            with shop.ledger.transaction():
                shop.ledger.execute(INSERT_KEY, (delivery.message.effect_key,))
                shop.ledger.record(delivery.message.effect_key)
        except Exception as error:                    # sqlite3's and psycopg's have no parent in common
            assert type(error).__name__ in ("IntegrityError", "UniqueViolation")
            delivery.nack()
        else:
            delivery.ack()

    def upsert(delivery, shop):
        with shop.ledger.transaction():
            shop.ledger.execute(f"{INSERT_KEY} ON CONFLICT (effect_key) DO UPDATE SET fingerprint = ''", (delivery.message.effect_key,))
            shop.ledger.record(delivery.message.effect_key)
        delivery.ack()

    def run(handler):
        return either.run(handler, [letter], faults=[crash.before("ack")], max_deliveries=10)
    endless = run(conflict_is_an_error)
    assert (endless.verdict, *numbers(endless, "deliveries", "effects", "pending")) == ("broken", 11, 1, 1)
    assert (run(upsert).verdict, *numbers(run(upsert), "deliveries", "effects", "duplicated")) == ("broken", 2, 2, 1)
    assert (run(once_then_ack).verdict, *numbers(run(once_then_ack), "deliveries", "effects", "once")) == ("holds", 2, 1, 1)


@pytest.mark.claim("I3")
def test_inbox_and_effect_in_two_transactions_have_a_window_on_either_side_and_in_one_none(either, letter):
    assert not_once(either.sweep(remember_first, [letter])) == {"after ledger.remember": "lost", "before ledger.record": "lost"}
    assert not_once(either.sweep(effect_first, [letter])) == {"after ledger.record": "duplicated", "before ledger.remember": "duplicated"}
    one = either.sweep(together, [letter])
    assert (not_once(one), len(one.rows) - 1, one.verdict) == ({}, 12, "holds")


@pytest.mark.claim("I3")
def test_inbox_and_effect_in_one_transaction_hold_in_each_order_of_two_workers(lab, letter):
    race = lab.race(together, letter)
    assert (race.verdict, race.total, race.counts["once"]) == ("holds", 32, 32)


def keyed_by(name):
    def handler(delivery, shop):
        shop.ledger.record_once(getattr(delivery.message, name), **delivery.message.payload)
        delivery.ack()
    return handler


def made(run):
    return [json.loads(detail)["wants"] for detail, in run.query("SELECT detail FROM effects ORDER BY id")]


ASKED = [Message(f"order-7:{wants}", request, sequence_key="order-7", payload={"wants": wants})
         for request, wants in (("request-1", "letter"), ("request-2", "letter"), ("request-3", "parcel"))]


@pytest.mark.claim("I4")
def test_a_producers_new_id_for_each_try_defeats_the_ledger_and_a_stable_key_does_not(lab):
    assert made(lab.run(keyed_by("message_id"), ASKED)) == ["letter", "letter", "parcel"]
    assert made(lab.run(keyed_by("effect_key"), ASKED)) == ["letter", "parcel"]


@pytest.mark.claim("I5")
def test_a_key_that_is_too_wide_swallows_an_effect_and_one_that_names_the_attempt_repeats_it(lab):
    def name_the_attempt(delivery, shop):
        shop.ledger.record_once(f"{delivery.message.effect_key}:{delivery.attempt}", **delivery.message.payload)
        delivery.ack()
    crashed = {"faults": [crash.before("ack")]}
    assert made(lab.run(keyed_by("sequence_key"), ASKED, **crashed)) == ["letter"]
    assert made(lab.run(name_the_attempt, ASKED[1:], **crashed)) == ["letter", "letter", "parcel"]
    assert made(lab.run(keyed_by("effect_key"), ASKED, **crashed)) == ["letter", "parcel"]


@pytest.mark.claim("I5")
def test_one_key_with_another_content_is_a_conflict_for_a_person(lab):
    def to_a_person(delivery, shop):
        if shop.ledger.record_once(delivery.message.effect_key, **delivery.message.payload) == "conflict":
            delivery.reject()
        else:
            delivery.ack()
    amounts = [Message("invoice-7:reminder", f"reminder-7-{name}", payload={"amount": amount}) for name, amount in (("a", 30), ("b", 30), ("c", 45))]
    for handler, dead_lettered in ((once_then_ack, 0), (to_a_person, 1)):
        run = lab.run(handler, amounts)
        assert numbers(run, "published", "effects", "once", "dead_lettered") == (3, 1, 1, dead_lettered)
        assert run.query("SELECT message_id FROM conflicts") == [("reminder-7-c",)]
    assert run.query("SELECT detail FROM effects") == [('{"amount": 30}',)]
    assert run.facts.where == {1: ["acked"], 2: ["acked"], 3: ["dead-lettered"]}


@pytest.mark.claim("I6")
def test_a_key_that_is_forgotten_before_the_last_repeat_repeats_and_one_that_is_kept_takes_a_row(lab):
    letters, later, published = lab.reminders(40), {1: 1, 2: 2, 3: 5, 4: 10, 5: 15, 6: 20, 7: 30}, []
    for number, message in enumerate(letters, 1):
        published += [message, *[letters[first - 1] for first, others in later.items() if first + others == number]]
    runs = {keys: lab.run(once_then_ack, published, forget_after=keys) for keys in (1, 8, 25, 30, 31, None)}
    assert {keys: (run.counts["duplicated"], run.query("SELECT count(*) FROM effect_keys")[0][0]) for keys, run in runs.items()} == {
        1: (7, 1), 8: (4, 8), 25: (1, 25), 30: (1, 30), 31: (0, 31), None: (0, 40)}
    assert "with 30 keys kept, 1 effect happened again; with 31 keys, none." in repr(plots.retention(list(runs.values())))


@pytest.mark.claim("I7")
def test_setting_a_value_is_idempotent_and_adding_to_one_is_not(either, opened):
    def at_each_point(handler, column):
        return [row.run.query(f"SELECT {column} FROM invoices")[0][0] for row in either.sweep(handler, [BOOK], continue_from=opened).rows]
    assert at_each_point(set_paid, "status") == ["paid"] * 7
    assert at_each_point(change_balance, "balance") == [90, 90, 90, 90, 80, 80, 90]


@pytest.mark.claim("I8")
def test_a_change_from_the_expected_state_only_repeats_nothing_and_says_why(either, opened):
    def run(handler):
        return either.run(handler, [BOOK, REFUND, BOOK], continue_from=opened, faults=[crash.before("ack", message=1)])
    assert balance(run(change_balance)) == 100 - 10 - 10 + 10 - 10
    right = run(change_state_and_balance)
    assert balance(right) == 100
    assert right.facts.printed.splitlines() == ["moved", "already booked", "moved", "refused: it is refunded"]


@pytest.mark.claim("I9")
def test_a_set_in_memory_forgets_at_the_crash_and_two_workers_do_not_share_it(either, letter):
    seen = set()

    def remember_in_memory(delivery, shop):
        if delivery.message.effect_key not in seen:
            seen.add(delivery.message.effect_key)
            shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    assert numbers(either.run(remember_in_memory, [letter, letter]), "published", "effects") == (2, 1)
    assert not_once(either.sweep(remember_in_memory, [letter])) == {"after ledger.record": "duplicated", "before ack": "duplicated"}
    assert numbers(either.race(remember_in_memory, letter), "duplicated", "once") == (20, 0)
    assert not_once(either.sweep(once_then_ack, [letter])) == {}


@pytest.mark.claim("I10")
def test_an_inbox_by_message_id_alone_suppresses_a_second_consumer(either):
    def by_id_alone(delivery, shop):
        with shop.ledger.transaction():
            if shop.ledger.execute("INSERT INTO inbox VALUES ('anybody', ?) ON CONFLICT DO NOTHING RETURNING 1", (delivery.message.message_id,)):
                shop.ledger.record(delivery.message.effect_key)
        delivery.ack()

    def bookkeeping(delivery, shop):
        together(delivery, shop)
    receipts, bookings = ([Message(f"payment-{n}:{effect}", f"payment-{n}") for n in (1, 2, 3)] for effect in ("receipt", "booking"))
    crashed = {"faults": [crash.before("ack", message=1)]}
    wrong = either.run(by_id_alone, bookings, continue_from=either.run(by_id_alone, receipts, **crashed))
    assert numbers(wrong, "published", "effects", "lost") == (3, 0, 3)
    right = either.run(bookkeeping, bookings, continue_from=either.run(together, receipts, **crashed))
    assert numbers(right, "published", "effects", "once", "lost") == (3, 3, 3, 0)
    assert right.query("SELECT consumer, count(*) FROM inbox GROUP BY consumer ORDER BY consumer") == [("bookkeeping", 3), ("together", 3)]


@pytest.mark.claim("I11")
def test_while_the_ledger_is_away_there_is_no_effect_and_no_ack_and_the_return_is_bounded(either, letter):
    def ack_anyway(delivery, shop):
        try:
            if shop.ledger.record_once(delivery.message.effect_key) == "recorded":
                print("letter")
        except LedgerError:
            pass
        delivery.ack()

    def print_unchecked(delivery, shop):
        try:
            answer = shop.ledger.record_once(delivery.message.effect_key)
        except LedgerError:
            answer = "no answer"
        if answer != "duplicate":
            print("letter")
        delivery.ack()

    def run(handler, step, times):
        found = either.run(handler, [letter, letter], faults=[fail(step, AWAY, times=times)], delivery_limit=3)
        return letters(found), *numbers(found, "deliveries", "effects", "once", "lost", "terminal", "dead_lettered")
    assert run(ack_anyway, "ledger.record_once", 2) == (0, 2, 0, 0, 1, 0, 0)
    assert run(print_unchecked, "ledger.record_once", 2) == (2, 2, 0, 0, 1, 0, 0)
    assert run(give_back, "ledger.record_once", 2) == (1, 4, 1, 1, 0, 0, 0)
    assert run(give_back, "ledger.record_once", 99) == (0, 8, 0, 0, 0, 1, 2)
    assert run(give_back, "receive", 2) == (1, 2, 1, 1, 0, 0, 0)
    assert run(give_back, "receive", 99) == (0, 0, 0, 0, 0, 1, 2)


@pytest.mark.claim("D3")
def test_three_acts_make_one_effect_and_one_key_joins_their_deliveries(either, letter):
    def record(delivery, shop):
        try:
            shop.ledger.record(delivery.message.effect_key)
        except TimeoutError:
            return delivery.reject(requeue=True)
        delivery.ack()

    def acts(handler, step):
        return either.run(handler, [letter], delivery_limit=5, faults=[fail(step, SLOW), lose.ack(attempt=2)])
    assert numbers(acts(record, "ledger.record"), "deliveries", "effects", "duplicated") == (3, 2, 1)
    run = acts(give_back, "ledger.record_once")
    assert (run.verdict, *numbers(run, "published", "deliveries", "effects", "once")) == ("holds", 1, 3, 1, 1)
    assert [(row["attempt"], row["what"], row["outcome"]) for row in run.trail(letter.effect_key).rows
            if row["what"] in ("ledger.record_once", "reject", "ack") and row["outcome"] != "reached"] == [
        (1, "ledger.record_once", "failed: TimeoutError: the database is slow"), (1, "reject", "sent, requeue=True"),
        (2, "ledger.record_once", "recorded"), (2, "ack", "unknown"), (3, "ledger.record_once", "duplicate"), (3, "ack", "sent")]
    assert run.facts.printed.splitlines() == ["letter", "duplicate effect suppressed"]
    assert run.query("SELECT effect_key, message_id, attempt FROM deliveries ORDER BY attempt") == [
        ("invoice-1:reminder", "reminder-1", attempt) for attempt in (1, 2, 3)]


@pytest.mark.claim("D10")
def test_a_follow_up_is_published_again_and_only_a_stable_id_lets_the_next_consumer_suppress_it(lab):
    queue = lab.queue("letters-sent")

    def announce(delivery, shop, event_id):
        shop.ledger.record_once(delivery.message.effect_key)
        delivery.channel.confirm_delivery()
        delivery.channel.basic_publish("", queue, b"letter sent", pika.BasicProperties(
            message_id=event_id, correlation_id=delivery.message.correlation_id, delivery_mode=2))
        delivery.ack()

    def new_event_id(delivery, shop):
        announce(delivery, shop, str(uuid.uuid4()))

    def derived_event_id(delivery, shop):
        announce(delivery, shop, f"{delivery.message.effect_key}:sent")
    with pika.BlockingConnection(lab.broker.address.parameters()) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum", "x-expires": 60_000})
        for handler, ids, effects in ((new_event_id, 2, 2), (derived_event_id, 1, 1)):
            first = lab.run(handler, [Message("invoice-1:reminder", correlation_id="case-1")], faults=[crash.before("ack")])
            assert numbers(first, "deliveries", "effects", "once") == (2, 1, 1)
            read = itertools.islice(channel.consume(queue, auto_ack=True, inactivity_timeout=10), 2)
            events = [Message(about.message_id, correlation_id=about.correlation_id) for _, about, _ in read]
            assert (len({event.effect_key for event in events}), {event.correlation_id for event in events}) == (ids, {"case-1"})
            assert numbers(lab.run(once_then_ack, events), "published", "effects") == (2, effects)
        channel.queue_delete(queue)


@pytest.mark.claim("I12")
def test_what_is_left_open_for_each_kind_of_effect_over_all_crash_points(either, opened):
    def print_then_record(delivery, shop):
        if shop.ledger.find(delivery.message.effect_key) is None:
            print("letter")
            shop.ledger.record(delivery.message.effect_key)
        delivery.ack()

    def intent_then_print(delivery, shop):
        if shop.status.move(delivery.message.effect_key, "new", "printing") == "moved":
            print("letter")
            shop.ledger.record(delivery.message.effect_key)
        elif shop.ledger.find(delivery.message.effect_key) is None:
            return delivery.reject()
        delivery.ack()

    def effects(run):
        return run.counts["effects"]

    def paid(run):
        return int(run.query("SELECT status FROM invoices") == [("paid",)])

    def booked(run):
        return (100 - balance(run)) // 10

    def window(handler, times):
        rows = either.sweep(handler, [BOOK], continue_from=opened).rows[1:]
        assert all(row.run.facts.fired == [1] for row in rows)
        return len(rows), {row.point: (times(row.run), row.run.counts["dead_lettered"]) for row in rows
                           if (times(row.run), row.run.counts["dead_lettered"]) != (1, 0)}
    assert window(once_then_ack, effects) == (6, {})
    assert window(together, effects) == (12, {})
    assert window(set_paid, paid) == (6, {})
    assert window(change_balance, booked) == (6, {"after ledger.execute": (2, 0), "before ack": (2, 0)})
    assert window(change_state_and_balance, booked) == (12, {})
    assert window(print_then_record, letters) == (8, {"before ledger.record": (2, 0)})
    assert window(give_back, letters) == (6, {"after ledger.record_once": (0, 0)})
    assert window(intent_then_print, letters) == (8, {"after status.move": (0, 1), "before ledger.record": (1, 1)})
