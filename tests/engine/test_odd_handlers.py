"""Handlers that do what nobody expects: told in the learner's terms, and the next run is as good as any."""
import pytest

from tests.engine import handlers


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
