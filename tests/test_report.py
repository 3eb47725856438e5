"""The words of a run, a sweep and a trail: exact, the same for the same run, and safe to show."""
import html.parser
import re

import pytest

from labkit import account, report, table
from labkit.expiry import Expiry, ExpiryRow
from labkit.message import Message
from labkit.palette import LOOKS, VERDICT_LOOKS, WORST_FIRST
from labkit.production import OUTCOMES
from labkit.result import STATUSES
from labkit.survival import Survival, SurvivalRow
from tests import tape
from tests.tape import Tape


class Page(html.parser.HTMLParser):
    """What a browser would show, and the tags with their attributes. Fails on a tag that is not closed."""

    def __init__(self, markup):
        super().__init__()
        self.words, self.tags, self._open = "", [], []
        self.feed(markup)
        assert not self._open, self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        self.words += " " * (tag in ("th", "td", "div", "caption"))

    def handle_data(self, data):
        self.words += data


def test_charges_have_a_column_and_a_total_only_where_the_provider_made_some():
    told = report.run_text(tape.charged_twice()).splitlines()
    assert told[:5] == ["broken: invoice-1:reminder was charged 2 times", "1 message · 2 deliveries · 1 effect · 2 charges", "",
                        "effect key          deliveries  effects  charges  status", "invoice-1:reminder           2        1        2  duplicated"]
    unknown = Tape().handle().run([1], charges=None)
    assert report.run_text(unknown).splitlines()[4] == "invoice-1:reminder           1        1  ?        unknown"
    swept = tape.sweep("charge", no_crash=tape.once(), after_provider__charge=tape.charged_twice())
    assert [line.split()[-4:] for line in report.sweep_text(swept).splitlines()[3:]] == [
        ["effects", "charges", "status", "verdict"], ["1", "0", "once", "holds"], ["1", "2", "duplicated", "broken"]]
    assert "charges" not in report.run_text(tape.duplicated()) + report.sweep_text(tape.late())


def test_a_run_is_told_by_verdict_totals_a_row_a_key_and_its_faults():
    assert report.run_text(tape.duplicated()) == """\
broken: invoice-1:reminder was recorded 2 times
1 message · 2 deliveries · 2 effects

effect key          deliveries  effects  status
invoice-1:reminder           2        2  duplicated

planned: crash.after('ledger.record'), fired"""


def test_what_the_learner_raised_and_printed_is_told_below_the_table():
    tape_ = Tape().receive().note("raised", error="ValueError: no", frames=[])
    run = tape_.run([0], account.DEAD_LETTERED, errors=["ValueError: no (line 2 of remind)"], printed="one\ntwo\n", printed_bytes=8,
                    planned=["crash.after('ack')"], fired=[0])
    assert report.run_text(run) == """\
unknown: the planned crash.after('ack') did not fire, so this run proves nothing about it
1 message · 1 delivery · 0 effects · 1 dead-lettered

effect key          deliveries  effects  status
invoice-1:reminder           1        0  terminal

planned: crash.after('ack'), did not fire
error: ValueError: no (line 2 of remind)

printed:
    one
    two"""


def test_an_ending_before_the_end_is_named_and_its_reason_is_not_said_twice():
    run = Tape().receive().run([0], account.HELD, ending="deadline", reason="the deadline of 15 s passed")
    assert report.run_text(run).endswith("\n\nending: deadline")
    other = Tape().receive().run([2], account.HELD, ending="deadline", reason="the deadline of 15 s passed")
    assert report.run_text(other).endswith("\n\nending: deadline: the deadline of 15 s passed")


def test_what_could_not_be_asked_is_not_told_as_zero():
    text = report.run_text(Tape().run(None, ending="unreachable", reason="the broker is gone"))
    assert "1 message · 0 deliveries · an unknown number of effects" in text
    assert re.search(r"invoice-1:reminder +0 +\? +unknown", text)


def test_of_many_keys_those_that_are_not_once_are_shown_and_the_rest_is_counted():
    run = _many(30, duplicated=(20, 25), lost=(30,))
    lines = report.run_text(run).split("\n")
    rows = lines[4:16]
    assert [row.split()[0] for row in rows[:4]] == ["invoice-20:reminder", "invoice-25:reminder", "invoice-30:reminder", "invoice-1:reminder"]
    assert lines[16] == "… and 18 more keys: 18 once"
    assert "… and 18 more keys: 18 once" in Page(report.run_html(run)).words


def test_a_status_that_is_cut_away_is_still_counted_by_name():
    run = _many(30, duplicated=range(1, 16), lost=(30,))
    assert "… and 18 more keys: 14 once, 3 duplicated, 1 lost" in report.run_text(run)


def test_twelve_keys_are_shown_in_the_order_published():
    text = report.run_text(_many(12, duplicated=(12,)))
    assert [line.split()[0] for line in text.split("\n")[4:16]] == [f"invoice-{n}:reminder" for n in range(1, 13)]
    assert "more key" not in text


@pytest.mark.parametrize("printed, total, shown, words", [
    ("".join(f"{n}\n" for n in range(30)), 80, [str(n) for n in range(10)], "printed (80 bytes, of which this is the beginning)"),
    ("x" * 700, 700, ["x" * 600], "printed (700 bytes, of which this is the beginning)"),
    ("cut by the supervisor", 5_000_000, ["cut by the supervisor"], "printed (5,000,000 bytes, of which this is the beginning)"),
    ("all of it\n", 10, ["all of it"], "printed"),
    ("\x1b[31mred\x07\n", 10, ["\\x1b[31mred\\x07"], "printed"),
])
def test_what_handlers_printed_is_cut_and_the_cut_is_stated(printed, total, shown, words):
    text = report.run_text(tape.Tape().handle().run([1], printed=printed, printed_bytes=total))
    assert text.split("\n\n")[-1].split("\n") == [f"{words}:", *[f"    {line}" for line in shown]]


def test_a_verdict_is_told_by_its_word_only_where_it_is_meant():
    for run, meant in ((tape.once(), "holds"), (tape.lost(), "broken")):
        words = Page(report.run_html(run)).words + report.run_text(run)
        assert [word for word in VERDICT_LOOKS if word in words] == [meant]


def test_html_says_what_the_text_says():
    for run in (tape.duplicated(), tape.lost(), tape.terminal(), _many(30, duplicated=(3,))):
        said = set(re.findall(r"[\w:.'()-]+", Page(report.run_html(run)).words))
        assert set(re.findall(r"[\w:.'()-]+", report.run_text(run))) <= said


def test_html_shows_what_learners_wrote_and_never_interprets_it():
    evil = "<script>alert('1')</script>&amp;\""
    tape_ = Tape([Message(evil)]).receive().note("raised", error=f"ValueError: {evil}", frames=[])
    run = tape_.run([0], account.DEAD_LETTERED, printed=evil, printed_bytes=len(evil), errors=[evil])
    for markup in (report.run_html(run), run.trail(evil)._repr_html_()):
        page = Page(markup)
        assert not [tag for tag, _ in page.tags if tag == "script"]
        assert evil in page.words


def test_tables_name_their_columns_rows_and_subject():
    for markup in (report.run_html(tape.duplicated()), report.sweep_html(tape.late()), tape.lost().trail("invoice-1:reminder")._repr_html_()):
        tags = Page(markup).tags
        assert [tag for tag, _ in tags].count("caption") == 1
        assert {attributes["scope"] for tag, attributes in tags if tag == "th"} == {"col", "row"}


def test_a_status_has_colour_symbol_and_word():
    assert set(LOOKS) == {*STATUSES, *OUTCOMES} == set(WORST_FIRST)
    assert len({look.colour for look in LOOKS.values()}) == len({look.symbol for look in LOOKS.values()}) == len(LOOKS)
    page = Page(report.run_html(tape.lost()))
    assert ("span", {"aria-hidden": "true", "style": f"color: {LOOKS['lost'].colour}"}) in page.tags
    assert "○ lost" in page.words


def test_a_sweep_is_told_by_a_row_a_crash_point():
    assert report.sweep_text(tape.late()) == """\
broken: after ledger.record: invoice-1:reminder was recorded 2 times (2 of 6 crash points are broken)
late · 6 crash points

crash point           deliveries  effects  status      verdict
no crash                       1        1  once        holds
before receive                 1        1  once        holds
after receive                  1        1  once        holds
before ledger.record           1        1  once        holds
after ledger.record            2        2  duplicated  broken
before ack                     2        2  duplicated  broken
after ack                      1        1  once        holds"""


def test_a_trail_folds_a_step_into_one_row_and_leaves_one_that_was_not_done():
    assert repr(tape.in_transaction(crash_before_commit=True).trail("invoice-1:reminder")) == """\
invoice-1:reminder: 2 deliveries, 1 effect, once
attempt  lane      what           outcome
         broker    published      confirmed
      1  worker 1  receive        redelivered=False
      1  worker 1  ledger.begin   done
      1  worker 1  ledger.record  recorded, not committed yet
      1  worker 1  ledger.commit  reached
      1  worker 1  killed         by crash.before('ledger.commit')
      2  worker 1  receive        redelivered=True
      2  worker 1  ledger.begin   done
      2  worker 1  ledger.record  recorded, not committed yet
      2  worker 1  ledger.commit  done
      2  worker 1  ack            sent
      2  worker 1  returned"""


def test_a_lost_ack_is_told_between_its_sending_and_what_the_worker_knows():
    rows = tape.ack_dropped().trail("invoice-1:reminder").rows
    assert [(row["lane"], row["what"], row["outcome"]) for row in rows[3:7]] == [
        ("worker 1", "ack", "reached"), ("broker", "ack.dropped", "dropped: basic.ack, channel 1, tag 1; connection cut"),
        ("worker 1", "ack", "unknown"), ("worker 1", "returned", "")]


def test_a_dead_letter_follows_the_reject_that_made_it_whenever_it_was_heard_of():
    early = [row["what"] for row in tape.terminal().trail("invoice-1:reminder").rows]
    late = Tape().receive().note("raised", error="ValueError: no address", frames=[]).step("reject", "sent", requeue=False)
    late.told("dead-lettered", reason="rejected")
    assert early == [row["what"] for row in late.run([0], account.DEAD_LETTERED).trail("invoice-1:reminder").rows] \
        == ["published", "receive", "raised", "reject", "dead-lettered"]


def test_a_trail_tells_what_befell_a_lane_that_had_the_delivery_and_nothing_of_others():
    tape_ = Tape(2).receive(1).step("ledger.record").note("returned").receive(2)       # nobody answered message 1
    tape_._add("worker 1", "killed", "note", by="hand")
    run = tape_.run([1, 0], account.WAITING)
    assert [row["what"] for row in run.trail("invoice-1:reminder").rows] == ["published", "receive", "ledger.record", "returned", "killed"]
    assert [row["what"] for row in run.trail("invoice-2:reminder").rows] == ["published", "receive", "killed"]


def test_a_kill_after_the_ack_and_the_return_is_no_part_of_the_trail():
    tape_ = Tape(2).handle(1).receive(2)
    tape_._add("worker 1", "killed", "note", by="hand")
    assert "killed" not in [row["what"] for row in tape_.run([1, 0], account.WAITING).trail("invoice-1:reminder").rows]


def test_an_ack_of_several_is_told_in_the_trail_of_each():
    tape_ = Tape(2).receive(1).step("ledger.record").note("returned").receive(2).step("ledger.record").step("ack", "sent", multiple=True).note("returned")
    tape_._add("worker 1", "killed", "note", by="hand")
    run = tape_.run([1, 1])
    for key in run.statuses:
        assert ("ack", "sent, multiple=True") in [(row["what"], row["outcome"]) for row in run.trail(key).rows]
        assert "killed" not in [row["what"] for row in run.trail(key).rows]


def test_an_effect_for_another_key_is_told_in_both_trails():
    run = Tape(2).receive(1).step("ledger.record", effect_key="invoice-2:reminder").run([0, 1])
    assert [row["outcome"] for row in run.trail("invoice-1:reminder").rows][-1] == "recorded for invoice-2:reminder"
    assert [row["outcome"] for row in run.trail("invoice-2:reminder").rows][-1] == "recorded, while handling invoice-1:reminder"


def test_copies_of_a_message_are_told_apart_by_their_position():
    message = Message("invoice-1:reminder")
    run = Tape([message, message]).handle(1).handle(2, outcome="duplicate").run([1])
    lines = repr(run.trail("invoice-1:reminder")).split("\n")
    assert lines[1].split() == ["message", "attempt", "lane", "what", "outcome"]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "1", "1", "1", "1", "2", "2", "2", "2"]


def test_nothing_that_differs_from_run_to_run_is_told():
    tape_ = Tape().receive().reach("ack", multiple=False).note("channel.closed", code=404, text="NOT_FOUND - no queue 'labkit.1df5.5.work' in vhost '/'")
    tape_.note("connection.lost", error="StreamLostError")
    outcomes = {row["what"]: row["outcome"] for row in tape_.run([0], account.WAITING).trail("invoice-1:reminder").rows}
    assert outcomes["channel.closed"] == "404 NOT_FOUND - no queue '…' in vhost '…'"
    assert outcomes["connection.lost"] == ""


def test_a_long_trail_is_cut_in_its_middle_and_the_cut_is_stated():
    tape_ = Tape()
    for attempt in range(1, 21):
        tape_.receive(attempt=attempt).step("nack", "sent", requeue=True).note("returned")
    trail = tape_.run([0], account.WAITING).trail("invoice-1:reminder")
    assert len(trail.rows) == 61
    assert len(repr(trail).split("\n")) == 2 + 30 + 1 + 10 and "… 21 more lines …" in repr(trail)
    assert "… 21 more lines …" in trail._repr_html_()


def test_what_survived_a_kill_is_told_by_what_was_promised_and_without_chance_the_same_each_time():
    def told(promised, by_chance):
        return Survival([SurvivalRow("classic", True, True, True, 3, promised), SurvivalRow("classic", False, True, True),
                         SurvivalRow("quorum", True, False, True, 3, 3), SurvivalRow("quorum", True, False, False, 3, by_chance)])
    assert str(told(3, 1)) == """\
holds: 3 of 3 confirmed messages survived that were persistent in a durable queue, and 3 of 3 that were transient in a quorum queue
the broker's process was killed, and started again

queue                 message     publisher      published  survived  kept                    promised
classic, durable      persistent  confirmed              3         3  all                     yes
classic, not durable  persistent  confirmed              0            refused by this broker  no
quorum, durable       transient   confirmed              3         3  all                     yes
quorum, durable       transient   not confirmed          3         1  some                    no"""
    assert told(3, 1)._repr_html_() != told(3, 0)._repr_html_()
    assert str(told(3, 1).certain) == str(told(3, 0).certain) and "not confirmed" not in str(told(3, 1).certain)
    assert told(2, 3).verdict == "broken" and told(2, 3).why.startswith("2 of 3 confirmed messages survived that were persistent")
    words = Page(told(2, 3)._repr_html_()).words
    assert all(word in words for word in ("broken", told(2, 3).why, "not confirmed", "refused by this broker", "some"))


def test_what_expired_beside_a_kill_is_judged_by_what_may_lose_nothing_and_only_where_the_kill_hit():
    def told(before, arrived, twice=2):
        return Expiry([ExpiryRow("classic", "at-most-once", 3000, 3000, 3000, 0), ExpiryRow("quorum", "at-most-once", 3000, 0, 2000, 0),
                       ExpiryRow("quorum", "at-least-once", 3000, before, arrived, twice)])
    assert str(told(1200, 3000)) == """\
holds: at-least-once dead-lettering lost 0 of 3,000 messages
the broker's process was killed while the delay queues expired, and started again

delay queue  dead-lettering  published  kill           arrived before it  arrived   lost  arrived twice
classic      at-most-once        3,000  too late                   3,000    3,000      0              0
quorum       at-most-once        3,000  too early                      0    2,000  1,000              0
quorum       at-least-once       3,000  in the middle              1,200    3,000      0              2"""
    assert (told(1200, 2999).verdict, told(1200, 2999).why) == ("broken", "at-least-once dead-lettering lost 1 of 3,000 messages")
    assert (told(0, 3000).verdict, told(0, 3000).why) == ("unknown", "the kill came too early: 0 of 3,000 messages had arrived, so nothing is proven")
    assert told(3000, 3000).verdict == "unknown" and told(3000, 3000).why.startswith("the kill came too late")
    assert told(3000, 2999).verdict == "broken"
    words = Page(told(1200, 3000)._repr_html_()).words
    assert all(word in words for word in ("holds", told(1200, 3000).why, "at-most-once", "too early", "in the middle"))


def test_a_long_value_is_cut_in_its_middle_and_control_characters_are_shown():
    assert table.plain("a" * 40 + "b" * 40, 20) == "a" * 13 + "…" + "b" * 6
    assert table.plain("tab\tnew\nline\x1b") == "tab\\tnew\\nline\\x1b"


def _many(number, duplicated=(), lost=()):
    effects = [1] * number
    for position in duplicated:
        effects[position - 1] = 2
    for position in lost:
        effects[position - 1] = 0
    return Tape(number).run(effects)
