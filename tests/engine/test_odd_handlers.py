"""Handlers that do what nobody expects: told in the learner's terms, and the next run is as good as any."""
import functools
import os

import pika
import pytest

from labkit import HandlerError, Message, Run, crash, hang, plots, topology
from labkit.table import plain
from tests.engine import handlers
from tests.test_report import Page


def call_itself(delivery, shop):
    call_itself(delivery, shop)


def raise_a_long_story(delivery, shop):
    raise ValueError("far " * 100_000)


def raise_without_words(delivery, shop):
    class Wordless(Exception):
        def __str__(self):
            raise RuntimeError("no words")
    raise Wordless()


@pytest.mark.parametrize(("handler", "told"), [
    (call_itself, "RecursionError: maximum recursion depth exceeded (in call_itself: `call_itself(delivery, shop)`)"),
    (raise_a_long_story, "ValueError: far far"),
    (raise_without_words, "Wordless (in raise_without_words: `raise Wordless()`)")])
def test_an_error_of_any_size_and_kind_is_told(lab, handler, told):
    run = lab.run(handler, lab.reminders(1))
    assert (run.verdict, run.counts["terminal"]) == ("holds", 1)
    assert run.facts.errors[0].startswith(told)


def interrupt_yourself(delivery, shop):
    raise KeyboardInterrupt


def test_an_error_that_ends_the_process_is_told_with_its_line(lab):
    run = lab.run(interrupt_yourself, lab.reminders(1))
    assert run.verdict == "broken" and "gave up" in run.why
    assert run.facts.errors == ["KeyboardInterrupt:  (in interrupt_yourself: `raise KeyboardInterrupt`) — 6 times",
                                "worker 1 ended by itself, with status 1 — 6 times"]


def test_a_long_statement_is_in_the_trail(lab):
    def ask(delivery, shop):
        shop.ledger.execute("SELECT '" + "x" * 10_000 + "'")
        handlers.once_then_ack(delivery, shop)
    run = lab.run(ask, lab.reminders(1))
    assert [row["outcome"][:9] for row in run.trail("invoice-1:reminder").rows if row["what"] == "ledger.execute"] == ["SELECT 'x"]


def test_the_line_of_an_imported_helper_is_its_own_and_not_that_of_a_namesake(lab, tmp_path, monkeypatch):
    (tmp_path / "helper_of_one_test.py").write_text("def interrupt_yourself():\n    raise ValueError('helper')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def ask_the_helper(delivery, shop):
        import helper_of_one_test
        helper_of_one_test.interrupt_yourself()
    run = lab.run(ask_the_helper, lab.reminders(1))
    assert run.facts.errors == ["ValueError: helper (in interrupt_yourself: `raise ValueError('helper')`)"]


def answer_a_foreign_tag(delivery, shop):
    shop.ledger.record_once(delivery.message.effect_key)
    delivery.tag = 99
    delivery.ack()


def answer_all_and_then_an_earlier_one(delivery, shop, kept=[]):
    shop.ledger.record_once(delivery.message.effect_key)
    kept.append(delivery)
    if len(kept) == 2:
        delivery.ack(multiple=True)
        kept[0].ack()


@pytest.mark.parametrize("handler", [answer_a_foreign_tag, answer_all_and_then_an_earlier_one])
def test_an_answer_that_the_channel_does_not_know_is_found_out_although_nobody_waited_for_it(lab, handler):
    run = lab.run(handler, lab.reminders(2), prefetch=2, max_deliveries=3)
    assert run.verdict == "broken" and "406 PRECONDITION_FAILED - unknown delivery tag" in run.why


def test_a_message_that_only_seemed_to_be_answered_is_waited_for_by_the_worker(lab):
    run = lab.run(answer_a_foreign_tag, lab.reminders(1), max_deliveries=2)
    assert run.counts["deliveries"] == 3
    # one start; after each of the first two deliveries one on a new channel, and one more where the queue is counted anew
    assert [event.name for event in run.events].count("started") <= 1 + 2 * 2


def fork_and_come_back(delivery, shop):
    parent = os.getpid()
    os.fork()
    shop.ledger.find(delivery.message.effect_key)
    if os.getpid() == parent:
        os.wait()
        handlers.once_then_ack(delivery, shop)


def test_a_child_that_comes_back_from_the_handler_is_no_worker_and_writes_no_trace(lab):
    run = lab.run(fork_and_come_back, lab.reminders(3))
    assert (run.verdict, run.counts["deliveries"]) == ("holds", 3)
    assert [event.name for event in run.events if event.phase == "before"] == ["receive", "ledger.find", "ledger.record_once", "ack"] * 3


def roll_back_and_raise(delivery, shop):
    with shop.ledger.transaction():
        shop.ledger.execute("ROLLBACK")
        raise ValueError("out of stock")


def test_a_transaction_that_the_body_ended_does_not_hide_the_bodys_own_error(lab):
    assert lab.run(roll_back_and_raise, lab.reminders(1)).facts.errors == [
        'ValueError: out of stock (in roll_back_and_raise: `raise ValueError("out of stock")`)']


async def later(delivery, shop):
    delivery.ack()


def bit_by_bit(delivery, shop):
    yield delivery.ack()


@pytest.mark.parametrize(("handler", "cause"), [
    (later, "async"), (bit_by_bit, "yield"), (functools.partial(later), "async"), (lambda delivery: None, "too many"),
    (lambda delivery, shop, price: None, "price"), (functools.partial(handlers.once_then_ack, "x", "y"), "too many"), (type("Shop", (), {}), "Shop")])
def test_what_cannot_be_called_as_a_handler_is_refused_before_the_run(lab, handler, cause):
    with pytest.raises(HandlerError, match=cause):
        lab.run(handler, lab.reminders(1))


def test_a_hung_worker_that_has_more_in_its_buffer_does_not_wait_for_the_deadline(lab):
    run = lab.run(handlers.once_then_ack, lab.reminders(3), prefetch=3, faults=[hang.at("ack", message=2)], deadline_s=600)
    assert (run.verdict, run.counts["once"], run.counts["pending"]) == ("unknown", 1, 2)
    assert "hung" in run.why


@pytest.mark.parametrize(("messages", "deadline_s"), [(1, 600), (2, 3)])
def test_a_worker_that_hangs_in_a_transaction_is_told_to_hold_the_lock(lab, messages, deadline_s):
    def ack_in_a_transaction(delivery, shop):
        with shop.ledger.transaction():
            handlers.effect_then_ack(delivery, shop)
    run = lab.run(ack_in_a_transaction, lab.reminders(messages), workers=messages, faults=[hang.at("ack", message=1)], deadline_s=deadline_s)
    holder = next(event.lane for event in run.events if event.name == "stopped")
    assert run.verdict == "unknown" and run.why.endswith(f" while {holder}, frozen inside a transaction, held the ledger's lock")


def test_a_kill_under_automatic_acknowledgement_does_not_end_the_publishing(lab):
    run = lab.run(handlers.effect_only, lab.reminders(4), acknowledge="auto", publish="while", rate=20, faults=[crash.before("ledger.record")])
    assert (run.verdict, run.counts["published"]) == ("broken", 4)
    assert run.counts["lost"] >= 1 and run.counts["once"] >= 1 and run.counts["lost"] + run.counts["once"] == 4   # what came before the broker saw the death is lost too


def leave_a_variable(delivery, shop):
    os.environ["LABKIT_TEST_LEFT"] = "1"


def leave_an_alarm(delivery, shop):
    import signal
    signal.setitimer(signal.ITIMER_REAL, 60)


def leave_a_thread(delivery, shop):
    import threading
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def leave_a_module(delivery, shop):
    import helper_left_behind  # noqa: F401


@pytest.mark.parametrize("leave", [leave_a_variable, leave_an_alarm, leave_a_thread, leave_a_module])
def test_a_process_in_which_something_was_left_serves_no_other_run(lab, leave, tmp_path, monkeypatch):
    tmp_path.joinpath("helper_left_behind.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    def handler(delivery, shop, leave=leave):
        print(os.getpid())
        leave(delivery, shop)
        delivery.ack()
        shop.ledger.record(delivery.message.effect_key)
    served = [lab.run(handler, lab.reminders(1)).facts.printed for _ in range(4)]
    assert len(set(served)) == 4


def test_a_process_in_which_nothing_was_left_serves_again(lab):
    def handler(delivery, shop):
        print(os.getpid())
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()
    served = [lab.run(handler, lab.reminders(1)).facts.printed for _ in range(6)]
    assert len(set(served)) < 6


def write_under_keys_that_are_no_text(delivery, shop):
    shop.ledger.execute("INSERT INTO effects (effect_key, detail) VALUES (?, '{}')", (b"\xff",))
    handlers.once_then_ack(delivery, shop)


def test_effects_under_keys_that_are_no_text_are_strays_and_can_be_saved(lab, tmp_path):
    run = Run.load(lab.run(write_under_keys_that_are_no_text, lab.reminders(1)).save(tmp_path / "run"))
    assert (run.verdict, run.strays) == ("broken", {"b'\\xff'": 1})


@pytest.mark.parametrize("prefetch", [1, 3])
def test_an_answer_past_labkit_is_told_as_such_and_not_as_none(lab, prefetch):
    def answer_in_pika(delivery, shop):
        shop.ledger.record_once(delivery.message.effect_key)
        delivery.channel.basic_ack(delivery.tag)
    run = lab.run(answer_in_pika, lab.reminders(3), prefetch=prefetch)
    assert run.verdict == "unknown" and "through pika's channel" in run.why
    assert run.counts["once"] + run.counts["pending"] == 3 and run.counts["once"] >= 1


def die_each_time(delivery, shop):
    os._exit(3)


def test_what_the_broker_dead_letters_at_the_last_death_is_not_lost(lab):
    """The sixth death is the last; with a limit of five it also moves what the worker held to the dead-letter queue."""
    for _ in range(5):
        run = lab.run(die_each_time, lab.reminders(12), prefetch=100, delivery_limit=5)
        assert "gave up" in run.why and (run.counts["terminal"], run.counts["lost"]) == (12, 0)


@pytest.mark.parametrize("headers", [{}, {"labkit-position": 99}, {"labkit-position": "one"}])
def test_a_message_that_the_handler_publishes_itself_may_be_dead_lettered(lab, headers):
    queue = topology.work_queue(lab._prefix, lab._runs + 1)

    def publish_another(delivery, shop):
        if delivery.message.effect_key == "another":
            return delivery.reject()
        delivery.channel.basic_publish("", queue, b'{"effect_key": "another"}', pika.BasicProperties(headers=headers))
        handlers.once_then_ack(delivery, shop)
    run = lab.run(publish_another, lab.reminders(1))
    assert (run.verdict, run.counts["once"], run.strays) == ("holds", 1, {})
    assert [event.effect_key for event in run.events if event.name == "reject" and event.phase == "after"] == ["another"]


@pytest.mark.parametrize("key", ["<script>alert('&')</script>", "\x1b[31mred\x07\x7f", "two\r\nlines\tand\0", "\u202eevil\u200f\u2028", "\U0001f600" * 63],
                         ids=["markup", "escapes", "lines", "direction", "long"])
def test_a_key_of_any_kind_is_shown_as_text_in_one_line(lab, key):
    def record_twice_and_raise(delivery, shop):
        for _ in range(2):
            shop.ledger.record(delivery.message.effect_key)
        raise ValueError(delivery.message.effect_key)
    message = Message(key, key, payload={key: key}, correlation_id=key)
    run, sweep, race = (lab.run(record_twice_and_raise, [message]), lab.sweep(record_twice_and_raise, [message]),
                        lab.race(record_twice_and_raise, message, limit=1))
    tables = run, run.trail(key), sweep, race
    pictures = run.plot(), plots.deliveries_and_effects(run), plots.queue_growth(run), sweep.plot(), race.plot()
    for shown in (*tables, *pictures):
        assert plain(key) in repr(shown) and all(line.isprintable() for line in repr(shown).split("\n"))
    for page in (Page(shown._repr_html_()) for shown in tables):
        assert plain(key) in page.words and "script" not in {tag for tag, _ in page.tags}
    assert all(picture.png for picture in pictures)


def test_keys_that_are_named_in_a_reason_are_text_in_one_line_too(lab):
    key = "two\r\nlines"
    for handler in (handlers.effect_only, handlers.nack_always, lambda delivery, shop: delivery.ack()):
        run = lab.run(handler, [Message(key)], max_deliveries=2)
        assert run.verdict == "broken" and plain(key) in run.why and run.why.isprintable()
