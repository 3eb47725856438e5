"""The pictures: what is drawn is what happened, nothing covers anything, and a text says the same."""
import dataclasses
import io
import itertools
import os
import subprocess
import sys
import types

import matplotlib
import PIL.Image
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import same_color, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text

from labkit import account, plots
from labkit.errors import PlanError
from labkit.faults import crash
from labkit.message import Message
from labkit.palette import LOOKS
from labkit.result import Run
from labkit.sampling import Sample
from labkit.watch import Watch
from tests import tape
from tests.tape import Produced, Tape

KEY = "invoice-1:reminder"


def many(number, duplicated=(), lost=()):
    effects = [2 if at in duplicated else 0 if at in lost else 1 for at in range(1, number + 1)]
    tape_ = Tape(number)
    for at in range(1, number + 1):
        if at in duplicated:
            tape_.receive(at).step("ledger.record").kill("crash.after('ledger.record')")
        tape_.handle(at, attempt=2 if at in duplicated else 1)
    return tape_.run(effects)


def two_copies_two_workers():
    message = Message("customer-of-the-northern-branch-office/2024/invoice-1234567890:second-reminder-with-$\\frac{$")
    tape_ = Tape([message, message]).receive(1).step("ledger.record_once", "recorded").step("ack", "unknown").note("returned").note("connection.lost")
    tape_.receive(1, 2, 2).step("ledger.find", "found", 2).step("ledger.remember", "duplicate", 2).step("ack", "sent", 2).note("returned", 2)
    return tape_.receive(2, 1, 2).kill("crash.after('receive')", 2).run([1], where={1: account.ACKED, 2: account.WAITING})


def hot_loop():
    tape_ = Tape()
    for attempt in range(1, 21):
        tape_.receive(attempt=attempt).step("nack", "sent", requeue=True).note("returned")
    return tape_.run([0], account.WAITING, ending="max_deliveries", reason=f"{KEY} was delivered more than 20 times, so the run was stopped")


def frozen():
    return Tape().receive().step("ledger.record_once", "recorded").reach("ack").note("stopped", by="hang.at('ack')").run([1], account.HELD)


def kept(limit, keys, repeated=0):
    """Returns a run whose ledger keeps `keys` keys, and in which `repeated` effects happened again."""
    run, ledger = many(8, set(range(1, repeated + 1))), types.SimpleNamespace(query=lambda statement, parameters: [(keys,)])
    settings = {**run.facts.settings, "forget_after": limit}
    return Run(run.messages, run.events, dataclasses.replace(run.facts, settings=settings), ledger)


def forgetting():
    return [kept(None, 8), kept(1, 1, 5), kept(2, 2, 3), kept(5, 5)]


def seen(name, workers, faults=(), samples=30, repeats=1, hole=()):
    """Returns a watch: ten messages come at each sample until the 20th, and each worker settles three."""
    watch, settled = Watch(name, {"workers": workers}, faults=list(faults), began_ms=40.0, over=True), 0
    for at in range(samples):
        arrived = min(at + 1, 20) * 10
        settled = min(arrived, settled + 3 * workers)
        left = arrived - settled
        watch.samples.append(Sample(at_ms=100.0 * (at + 1), ready=None if at in hole else max(left - workers, 0), waiting=max(left - workers, 0),
                                    in_flight=min(left, workers), oldest_ms=30.0 * at * (left > 0), arrivals=arrived, services=settled,
                                    deliveries=settled * repeats, dead_lettered=0, arrivals_per_s=100.0, services_per_s=30.0 * workers,
                                    deliveries_per_s=30.0 * workers * repeats, mean_handling_ms=3.0))
    return watch


PICTURES = {
    "duplicated": lambda: tape.duplicated().plot(), "lost": lambda: tape.lost().plot(), "once": lambda: tape.once().plot(),
    "terminal": lambda: tape.terminal().plot(), "ack dropped": lambda: tape.ack_dropped().plot(), "frozen": lambda: frozen().plot(),
    "committed": lambda: tape.in_transaction().plot(), "undone": lambda: tape.in_transaction(crash_before_commit=True).plot(),
    "two copies, two workers": lambda: two_copies_two_workers().plot(), "hot loop": lambda: hot_loop().plot(),
    "broker unknown": lambda: Tape().run(None, ending="unreachable", reason="the broker is gone").plot(), "no message": lambda: Tape(0).run([]).plot(),
    "one sweep": lambda: tape.late().plot(), "two sweeps": lambda: tape.late().plot(tape.early()),
    "one cell": lambda: tape.sweep("a handler with a long name", no_crash=tape.once()).plot(), "deep sweep": lambda: deep_sweep().plot(),
    "eight keys": lambda: plots.deliveries_and_effects(many(8, {3}, {5})), "200 keys": lambda: many(200, {3, 77}, {150}).plot(),
    "1,000 keys": lambda: many(1000, {3, 77}, {150}).plot(), "growth": lambda: plots.queue_growth(many(30, {3}, ())),
    "watched": lambda: seen("one worker", 1, [(700.0, "killed")], hole=(11, 12)).plot(), "watched, nothing seen": lambda: seen("none", 1, samples=0).plot(),
    "watched, falling": lambda: seen("a handler with a name that is long enough for two lines, perhaps even for three of them", 3).plot(),
    "three watched": lambda: seen("1 worker", 1, [(700.0, "killed")]).plot(seen("2 workers", 2), seen("4 workers, with a long name that takes two lines", 4)),
    "five watched": lambda: seen("one", 1).plot(*[seen(f"no. {at}", at) for at in (2, 3, 4, 5)]), "watched beside a run": lambda: seen("one", 1).plot(many(30, {3})),
    "watched, with repeats": lambda: seen("hot loop", 1, repeats=9).plot(seen("quiet", 1)), "growth of nothing": lambda: plots.queue_growth(Tape(0).run([])), "retention": lambda: plots.retention(forgetting()),
    "retention, too short": lambda: plots.retention(forgetting()[1:3]), "retention of one": lambda: plots.retention([kept(1, 1, 1)]),
    "committed first": lambda: tape.committed_first().plot(), "event lost": lambda: tape.event_lost().plot(), "stray": lambda: tape.stray().plot(),
    "nothing": lambda: tape.nothing().plot(), "confirm dropped": lambda: tape.confirm_dropped().plot(), "passed on": lambda: tape.passed_on().plot(),
    "repeated": lambda: tape.repeated().plot(), "in the outbox": lambda: tape.left_in_the_outbox().plot(), "rolled back": lambda: rolled_back().plot(),
    "in vain": lambda: in_vain().plot(), "publish dropped": lambda: publish_dropped().plot(), "a handler that publishes": lambda: publishing_handler().plot(), "no order": lambda: Produced().run().plot(),
    "orders": lambda: tape.many_orders().plot(), "sweep with an outbox": lambda: tape.of_outbox().plot(),
    "sweeps of producers": lambda: tape.of_commit_first().plot(tape.of_outbox()),
    "charged twice": lambda: tape.charged_twice().plot(), "charged unheard": lambda: tape.charged_unheard().plot(),
    "used up": lambda: tape.used_up().plot(), "doubled": lambda: tape.doubled().plot(),
    "retry not taken": lambda: Tape().receive().retry(1000, "returned").step("nack", "sent", requeue=True).handle(1, attempt=2).run([1]).plot(),
    "retention of twelve": lambda: plots.retention([kept(limit, limit, max(0, 8 - limit)) for limit in range(1, 13)]),
}


def orders(number, lost=(), repeated=()):
    tape_ = Produced()
    for at in range(1, number + 1):
        tape_.step("ledger.record", f"order-{at}")
        for _ in range((at not in lost) + (at in repeated)):
            tape_.send(f"order-{at}")
    return tape_.run(*[f"order-{at}" for at in range(1, number + 1)])


def rolled_back():
    tape_ = Produced().step("ledger.begin").step("ledger.record", "order-1").step("outbox.add", "order-1", "added").step("ledger.rollback")
    return tape_.note("raised", error="ValueError: no stock", frames=[]).run()


def publish_dropped():
    return Produced().order("order-1").publish_dropped("order-1").publish("order-1").run("order-1")


def in_vain():
    tape_ = Produced().order("order-1", outbox=True).note("returned").by("relay 1")
    for _ in range(5):
        tape_.step("ledger.begin").step("outbox.read", outcome="1 waiting").publish("order-1", "nacked").step("ledger.commit").note("returned")
    tape_.published.clear()
    return tape_.run("order-1", outbox={"order-1": 1})


def publishing_handler():
    event = {"event_id": "receipt-1", "effect_key": "receipt-1"}
    tape_ = Tape().receive().step("ledger.record_once", "recorded").step("publish", "sent", **event).reach("confirm", **event)
    tape_.told("confirm.dropped", relay="dropped: basic.ack, channel 1, tag 1; connection cut")
    tape_._add("worker 1", "confirm", "after", 1, 1, 1, outcome="unknown", **event)
    return tape_.step("publish", "sent", **event).step("confirm", "confirmed", **event).step("ack", "sent").note("returned").run([1])


def deep_sweep():
    sweep = tape.late()
    pairs = [type(row)((*sweep.rows[1].faults, *row.faults), row.run) for row in sweep.rows[1:]]
    return type(sweep)("deep", sweep.rows + pairs + pairs)


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_covers_another_or_leaves_the_picture(name):
    figure = PICTURES[name]().figure
    FigureCanvasAgg(figure).draw()
    hidden = undrawn(figure)
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_gid() != "gap" and text.get_visible() and text not in hidden]
    for text in texts:
        box = text.get_window_extent()
        assert -1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1 and -1 <= box.y0 and box.y1 <= figure.bbox.y1 + 1, text
    for one, other in itertools.combinations([text for text in texts if text.get_rotation() in (0, 90)], 2):
        a, b = (text.get_window_extent() for text in (one, other))
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 0.5 or down <= 0.35 * min(a.height, b.height), (one, other)       # lines set close share the room for descenders


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_shows_itself_once_with_its_text_beside_it(name):
    picture = PICTURES[name]()
    markup = picture._repr_html_()
    assert markup.startswith('<img alt="') and markup.count("<img") == 1
    assert len(repr(picture)) > 20 and "\n" not in repr(picture)
    assert not hasattr(picture, "_repr_png_")
    assert len(markup) < 80_000


def test_a_trail_has_an_arrow_a_delivery_and_an_answer_a_mark_an_effect_and_a_cross_the_kill():
    ax = tape.duplicated().plot().figure.axes[0]
    assert count(ax, "delivery") == 1 and count(ax, "redelivery") == 1 and count(ax, "ack") == 1
    assert count(ax, "killed") == 1 and count(ax, "broken arrow") == 0 and count(ax, "busy") == 2
    assert [mark.get_color() for mark in named(ax, "effect")] == [LOOKS["once"].colour, LOOKS["duplicated"].colour]


def test_the_order_from_left_to_right_is_the_order_of_the_events_in_even_steps():
    ax = tape.duplicated().plot().figure.axes[0]
    at = sorted({round(x_of(artist), 3) for gid in ("published", "delivery", "redelivery", "effect", "killed", "ack") for artist in named(ax, gid)})
    assert len(at) == 7 and len({round(b - a, 3) for a, b in itertools.pairwise(at)}) == 1
    effect, kill, again = x_of(named(ax, "effect")[0]), x_of(named(ax, "killed")[0]), x_of(named(ax, "redelivery")[0])
    assert effect < kill < again


def test_the_arrow_of_an_ack_that_was_dropped_is_broken_and_ends_on_the_way():
    ax = tape.ack_dropped().plot().figure.axes[0]
    arrow, = named(ax, "broken arrow")
    lanes = {text.get_text(): text.get_position()[1] for text in named(ax, "lane")}
    assert lanes["worker 1"] <= min(arrow.get_ydata()) and max(arrow.get_ydata()) < lanes["broker"]
    assert arrow.is_dashed()
    assert count(ax, "ack") == 1 and count(ax, "dropped") == 1       # the second ack arrived
    assert "ack, dropped" in tape.ack_dropped().plot().alternative


def test_a_step_during_which_another_worker_went_on_is_drawn_once():
    message = Message(KEY)
    tape_ = Tape([message, message]).receive(1, 1, 1)
    tape_._add("worker 2", "receive", "before", 2, None, 1, redelivered=False)
    tape_.reach("ledger.record")
    tape_._current[2] = (2, 1, 1)
    tape_._add("worker 2", "receive", "after", 2, 1, 1, redelivered=False)
    tape_._add("worker 1", "ledger.record", "after", 1, 1, 1)
    tape_.step("ledger.record", worker=2).step("ack", "sent", 1).step("ack", "sent", 2)
    ax = tape_.run([2]).plot().figure.axes[0]
    assert (count(ax, "delivery"), count(ax, "effect"), count(ax, "ack")) == (2, 2, 2)
    assert "not finished" not in [text.get_text() for text in named(ax, "words")]


def test_a_refused_ack_is_drawn_once_and_the_closed_channel_beside_it():
    tape_ = Tape().receive().step("ledger.record").reach("ack").note("channel.closed", code=406, text="PRECONDITION_FAILED - unknown delivery tag 1")
    tape_._add("worker 1", "ack", "after", 1, 1, 1, outcome="refused").note("returned")
    picture = tape_.run([1]).plot()
    assert count(picture.figure.axes[0], "ack") == 1 and count(picture.figure.axes[0], "channel.closed") == 1
    assert "worker 1: channel closed; ack, refused" in picture.alternative


def test_an_effect_counts_only_when_its_transaction_is_committed():
    undone = tape.in_transaction(crash_before_commit=True).plot().figure.axes[0]
    assert count(undone, "effect") == 1 and count(undone, "ledger.record") == 2
    assert count(undone, "undone") == 1 and count(undone, "committed") == 1
    assert same_color(named(undone, "effect")[0].get_color(), LOOKS["once"].colour)
    assert all(mark.get_mfc() != mark.get_color() for mark in named(undone, "ledger.record"))


def test_a_lost_effect_is_shown_by_an_empty_ring_in_the_ledgers_lane():
    ax = tape.lost().plot().figure.axes[0]
    ring = named(ax, "mark lost")[-1]
    assert ring.get_mfc() == "none" and count(ax, "effect") == 0
    assert ring.get_ydata()[0] == next(text.get_position()[1] for text in named(ax, "lane") if text.get_text() == "ledger")


def test_the_title_is_the_sentence_of_the_verdict_and_the_verdicts_word_is_not_decoration():
    for run in (tape.duplicated(), tape.lost(), tape.once(), many(20, {3})):
        figure = run.plot().figure
        title, = [text.get_text() for text in figure.findobj(Text) if text.get_gid() == "title"]
        assert title.replace("\n", " ") == run.why


def test_a_trail_too_long_to_draw_says_how_much_it_leaves_out():
    picture = hot_loop().plot()
    assert "27 events left out" in picture.alternative
    assert {"27 events", "left out"} <= {text.get_text() for text in named(picture.figure.axes[0], "words")}


def test_an_order_whose_relay_died_at_its_last_step_is_drawn_whole():
    tape_ = Produced().order("order-1", outbox=True).by("relay 1").step("ledger.begin").step("outbox.read", outcome="1 waiting").publish("order-1")
    tape_.step("outbox.mark", "order-1").reach("ledger.commit").kill(crash.before("ledger.commit", worker="relay")).pass_on("order-1")
    picture = tape_.run("order-1").plot()
    assert "left out" not in picture.alternative and count(picture.figure.axes[0], "outbox.read") == 2


def test_each_worker_has_a_lane_in_the_order_of_their_numbers():
    lanes = named(two_copies_two_workers().plot().figure.axes[0], "lane")
    assert [text.get_text() for text in sorted(lanes, key=lambda text: -text.get_position()[1])] == ["broker", "worker 1", "worker 2", "ledger"]


def test_the_sentence_of_a_trail_tells_its_events_in_order():
    assert repr(tape.duplicated().plot()) == (
        "Trail of invoice-1:reminder: 2 deliveries, 2 effects, duplicated. published; delivery 1 to worker 1; ledger.record: recorded; "
        "worker 1 killed after record; delivery 2 to worker 1, redelivered; ledger.record: recorded again; ack. "
        "Verdict: broken; invoice-1:reminder was recorded 2 times.")


def test_a_publish_goes_up_a_confirm_comes_down_thin_and_each_process_has_its_lane():
    ax = tape.passed_on().plot().figure.axes[0]
    lanes = lanes_of(ax)
    assert sorted(lanes, key=lanes.get, reverse=True) == ["broker", "producer 1", "relay 1", "ledger"]
    publish, = named(ax, "publish")
    confirm, = named(ax, "confirm")
    assert (publish.xyann[1], publish.xy[1]) == (lanes["relay 1"], lanes["broker"])
    assert (confirm.xyann[1], confirm.xy[1]) == (lanes["broker"], lanes["relay 1"])
    assert confirm.arrow_patch.get_linewidth() < publish.arrow_patch.get_linewidth()
    assert count(ax, "busy") == 2 and count(ax, "broken arrow") == 0


@pytest.mark.parametrize("make, lane", [(tape.confirm_dropped, "producer 1"), (publishing_handler, "worker 1")])
def test_the_arrow_of_a_confirm_that_was_dropped_breaks_near_the_broker(make, lane):
    picture = make().plot()
    ax = picture.figure.axes[0]
    arrow, = named(ax, "broken arrow")
    cross, = named(ax, "dropped")
    lanes = lanes_of(ax)
    middle = (lanes["broker"] + lanes[lane]) / 2
    assert arrow.is_dashed() and max(arrow.get_ydata()) == lanes["broker"]
    assert min(arrow.get_ydata()) > cross.get_ydata()[0] > middle
    assert "publish; confirm, dropped" in picture.alternative


def test_a_confirm_that_was_dropped_says_nothing_about_the_ack_or_the_confirm_after_it():
    picture = publishing_handler().plot()
    assert picture.alternative.endswith("publish; confirm, dropped; publish, same id; confirmed; ack. Verdict: holds; every effect is accounted for: 1 of 1 once.")
    assert [count(picture.figure.axes[0], gid) for gid in ("publish", "confirm", "ack", "broken arrow")] == [2, 1, 1, 1]


def test_a_confirm_that_was_not_heard_after_one_that_was_dropped_is_unknown():
    picture = Produced().order("order-1").publish_unheard("order-1").publish("order-1", "unknown").run("order-1").plot()
    assert "publish; confirm, dropped; publish, same id; confirm, unknown. Verdict" in picture.alternative
    assert [count(picture.figure.axes[0], gid) for gid in ("dropped", "mark unknown")] == [1, 1]


@pytest.mark.parametrize("outcome", ["sent", "not sent"])
def test_a_publish_that_was_dropped_breaks_near_the_broker_and_nothing_comes_back(outcome):
    run = Produced().order("order-1").publish_dropped("order-1", outcome).publish("order-1", "unknown").run("order-1")
    picture = run.plot()
    ax = picture.figure.axes[0]
    first, second = sorted(named(ax, "broken arrow"), key=x_of)                # the second confirm may have been on its way
    lanes = lanes_of(ax)
    assert min(first.get_ydata()) == lanes["producer 1"] and max(first.get_ydata()) < named(ax, "dropped")[0].get_ydata()[0] < lanes["broker"]
    assert max(second.get_ydata()) == lanes["broker"] and count(ax, "publish") == 1
    assert named(ax, "confirm")[0].get_ydata()[0] == lanes["producer 1"]
    assert "publish, dropped; confirm, unknown; publish, same id; confirm, unknown. Verdict" in picture.alternative


@pytest.mark.parametrize("outcome, said", [("nacked", "publish; nacked"), ("returned", "publish; returned"), ("2 confirmed", "publish; confirm, 2 confirmed")])
def test_what_the_broker_said_comes_down_whatever_it_is(outcome, said):
    picture = Produced().order("order-1").publish("order-1", outcome).run("order-1").plot()
    assert count(picture.figure.axes[0], "confirm") == 1 and said in picture.alternative


@pytest.mark.parametrize("outcome", ["unknown", "blocked", "1 confirmed, 1 unknown"])
def test_a_confirm_that_never_came_is_a_broken_arrow_with_a_question_mark(outcome):
    picture = Produced().order("order-1").publish("order-1", outcome).run("order-1").plot()
    ax = picture.figure.axes[0]
    assert [count(ax, gid) for gid in ("confirm", "broken arrow", "mark unknown", "dropped")] == [0, 1, 1, 0]
    assert f"confirm, {outcome}" in picture.alternative


@pytest.mark.parametrize("step", [{"outcome": "not sent"}, {"phase": "failed", "error": "TimeoutError: slow"}])
def test_what_was_not_sent_is_no_arrow(step):
    picture = Produced().order("order-1").step("publish", "order-1", **step).run("order-1").plot()
    ring, = named(picture.figure.axes[0], "publish")
    assert ring.get_marker() == "o" and count(picture.figure.axes[0], "broken arrow") == 0
    assert f"publish, {step.get('outcome', 'failed')}" in picture.alternative


def test_a_publish_tells_whether_a_consumer_can_recognise_it():
    tape_ = Produced().order("order-1").publish("order-1").publish("order-1").publish("order-1", event_id="another")
    assert "publish; confirmed; publish, same id; confirmed; publish, another id; confirmed" in tape_.run("order-1").plot().alternative


def test_an_event_waits_on_the_ledgers_lane_from_its_commit_to_the_commit_of_its_mark():
    ax = tape.repeated().plot().figure.axes[0]
    line, = named(ax, "waiting")
    commits = [x_of(mark) for mark in (*named(ax, "effect"), *named(ax, "ledger.commit"))]
    assert list(line.get_xdata()) == commits and same_color(line.get_color(), LOOKS["pending"].colour)
    assert count(ax, "outbox.add") == 1 and count(ax, "event") == 1 and count(ax, "outbox.read") == 2 and count(ax, "outbox.mark") == 1
    assert not same_color(named(ax, "outbox.add")[0].get_mfc(), named(ax, "event")[0].get_mfc())         # tentative, and for good
    assert named(ax, "killed")[0].get_ydata()[0] == lanes_of(ax)["relay 1"]


def test_an_event_that_was_not_passed_on_waits_to_the_end_also_where_the_middle_is_left_out():
    for run in (tape.left_in_the_outbox(), in_vain()):
        picture = run.plot()
        ax = picture.figure.axes[0]
        line, = named(ax, "waiting")
        assert line.get_xdata()[1] > x_of(named(ax, "mark pending")[-1]) > line.get_xdata()[0] == x_of(named(ax, "effect")[0])
        assert "its event still waits in the outbox. Verdict" in picture.alternative
    tape_ = Produced()
    for _ in range(5):
        tape_.publish("order-1")
    tape_.order("order-1", outbox=True)
    for _ in range(3):
        tape_.publish("order-1")
    ax = tape_.run("order-1").plot().figure.axes[0]
    assert named(ax, "waiting")[0].get_xdata()[0] == round(named(ax, "gap")[0].get_position()[0], 9) and count(ax, "event") == 0


def test_an_event_that_an_earlier_run_left_waits_from_the_start_and_one_that_was_undone_never():
    ax = Produced().pass_on("order-1").run("order-1").plot().figure.axes[0]
    assert named(ax, "waiting")[0].get_xdata()[0] < x_of(named(ax, "ledger.begin")[0])
    assert count(rolled_back().plot().figure.axes[0], "waiting") == 0
    for undo in (lambda tape_: tape_.step("ledger.rollback"), lambda tape_: tape_.note("raised", error="ValueError: no", frames=[]), lambda tape_: tape_.kill("hand")):
        tape_ = Produced().step("ledger.begin").step("ledger.record", "order-1").step("outbox.add", "order-1", "added")
        undo(tape_)
        picture = tape_.order("order-1").publish("order-1").run("order-1").plot()
        assert count(picture.figure.axes[0], "waiting") == 0 and "ledger.commit: recorded; publish" in picture.alternative


def test_a_relay_that_is_called_again_after_an_error_is_busy_twice():
    tape_ = Produced().order("order-1", outbox=True).note("returned").by("relay 1").step("outbox.read", outcome="1 waiting")
    ax = tape_.note("raised", error="ValueError: no", frames=[]).pass_on("order-1").run("order-1").plot().figure.axes[0]
    assert count(ax, "busy") == 3


def test_what_is_missing_in_the_end_has_its_mark_on_the_lane_where_it_is_missing():
    for run, status, lane, said in ((tape.event_lost(), "lost", "broker", "no event at the broker"), (tape.stray(), "stray", "ledger", "no order in the ledger")):
        picture = run.plot()
        ax = picture.figure.axes[0]
        mark = named(ax, f"mark {status}")[-1]
        assert mark.get_ydata()[0] == lanes_of(ax)[lane] and mark.get_mfc() == "none" and same_color(mark.get_color(), LOOKS[status].colour)
        word, = [text for text in named(ax, "words") if text.get_text() == status]
        assert (word.get_position()[1] > lanes_of(ax)[lane]) == (lane == "broker") and said in picture.alternative
    assert not [gid for gid in ("mark lost", "mark stray") if count(tape.nothing().plot().figure.axes[0], gid)]


def test_a_kill_at_another_order_is_not_told_as_one_after_this_orders_last_step():
    tape_ = Produced().order("order-1", "order-2").publish("order-1").kill(crash.after("confirm"))
    assert "producer 1 killed at other work" in tape_.run("order-1", "order-2").trail("order-2").plot().alternative
    assert "producer 1 killed after confirm" in tape_.run("order-1", "order-2").trail("order-1").plot().alternative


def test_a_rollback_is_said_once():
    words = [text.get_text() for text in named(rolled_back().plot().figure.axes[0], "words")]
    assert words.count("rollback") == 1 and "undone" not in words and count(rolled_back().plot().figure.axes[0], "undone") == 1


def test_the_sweep_map_has_a_cell_a_crash_point_with_colour_mark_and_word():
    for sweep in (tape.late(), tape.early(), tape.of_commit_first()):
        ax = sweep.plot().figure.axes[0]
        cells = sorted((patch for patch in ax.patches if isinstance(patch, FancyBboxPatch)), key=lambda patch: patch.get_x())
        statuses = [row.status for row in sweep.rows]
        assert [cell.get_gid() for cell in cells] == [f"cell {status}" for status in statuses]
        assert [to_hex(cell.get_edgecolor()).upper() for cell in cells] == [LOOKS[status].colour for status in statuses]
        assert [text.get_text() for text in named(ax, "status")] == statuses
        assert [" ".join(text.get_text().split("\n")).replace("ledger. ", "ledger.") for text in named(ax, "point")] == [row.point for row in sweep.rows]
        for status in set(statuses):
            assert count(ax, f"mark {status}") == statuses.count(status)


def test_points_that_all_sweeps_share_head_their_columns_once():
    assert count(tape.late().plot(tape.late()).figure.axes[0], "point") == 7
    assert count(tape.late().plot(tape.early()).figure.axes[0], "point") == 14


def test_the_map_says_whom_it_killed():
    def said(*sweeps):
        return repr(sweeps[0].plot(*sweeps[1:])).split(".")[0]
    assert said(tape.late()) == "Each cell is one run, with the worker killed at that point"
    assert said(tape.of_commit_first()) == "Each cell is one run, with the producer killed at that point"
    assert said(tape.of_commit_first(), tape.of_outbox()) == "Each cell is one run, with the producer or relay killed at that point"
    assert said(tape.late(), tape.of_outbox()) == "Each cell is one run, with the worker, producer or relay killed at that point"


def test_the_crash_points_of_a_relay_begin_a_line_where_one_is_not_enough():
    ax = tape.of_outbox().plot().figure.axes[0]
    points = [(text.get_text().split()[0], round(text.get_position()[1], 3)) for text in named(ax, "point")]
    assert len(points) == 21 and len({y for _, y in points}) == 2
    assert {word == "relay" for word, y in points if y == min(y for _, y in points)} == {True}
    assert {word == "relay" for word, y in points if y == max(y for _, y in points)} == {False}


def test_nothing_is_quiet_and_repeated_is_no_two_dots():
    ax = tape.of_outbox().plot().figure.axes[0]
    alpha = {cell.get_gid(): (cell.get_facecolor()[3], cell.get_edgecolor()[3]) for cell in ax.patches if isinstance(cell, FancyBboxPatch)}
    assert all(quiet < loud for quiet, loud in zip(alpha["cell nothing"], alpha["cell once"]))
    assert {mark.get_marker() for mark in named(ax, "mark repeated")} == {"o"} and {mark.get_marker() for mark in named(ax, "more")} == {"+"}
    assert count(ax, "mark repeated") == count(ax, "more") == 6


def test_a_sweep_map_of_nothing_is_refused():
    with pytest.raises(PlanError, match="no sweep"):
        plots.sweep_map([])


def test_deliveries_go_up_and_effects_go_down_a_bar_a_key():
    ax = plots.deliveries_and_effects(many(8, {3}, {5})).figure.axes[0]
    heights = {gid: [bar.get_height() for bar in ax.patches if bar.get_gid() == gid] for gid in ("deliveries", "effects")}
    assert heights == {"deliveries": [1, 1, 2, 1, 1, 1, 1, 1], "effects": [-1, -1, -2, -1, 0, -1, -1, -1]}
    assert [list(mark.get_xdata()) for mark in named(ax, "mark lost")] == [[4]]


def test_orders_go_up_and_events_go_down_a_bar_a_key():
    picture = tape.many_orders().plot()
    ax = picture.figure.axes[0]
    orders, events = ([bar.get_height() for bar in ax.patches if bar.get_gid() == gid] for gid in ("deliveries", "effects"))
    assert orders == [1] * 30 + [0] and [-number for number in events] == [0 if at == 7 else 2 if at in (12, 15) else 1 for at in range(1, 32)]
    assert [text.get_text() for text in named(ax, "side")] == ["orders", "events"] and ax.get_xlabel() == "31 keys, in the order begun"
    assert list(named(ax, "mark stray")[0].get_xdata()) == [30] and list(named(ax, "mark lost")[0].get_xdata()) == [6]
    assert repr(picture) == (
        "Orders against events: 30 orders · 32 events. 1 duplicated: order-15; 1 lost: order-7; 1 stray: order-99; 1 repeated: order-12; 27 once. "
        "Verdict: broken; order-15 is there, and its event was published under 2 ids.")


def test_of_few_orders_the_trail_of_the_worst_is_drawn_and_of_those_the_one_with_most_events():
    run = Produced().order("order-1", "order-2", "order-3").publish("order-1").publish("order-2").publish("order-2").publish("order-3").publish("order-3")
    assert repr(run.publish("order-3").run("order-1", "order-2", "order-3").plot()).startswith("Trail of order-3: order, 3 events, repeated")


def test_where_a_pair_stands_for_several_orders_a_repeated_one_does_not_hide_a_lost_one():
    ax = orders(600, lost={301}, repeated={302}).plot().figure.axes[0]
    assert list(named(ax, "mark lost")[0].get_xdata()) == [100] and not list(named(ax, "mark repeated")[0].get_xdata())


def test_marks_of_repeated_orders_that_are_neighbours_do_not_run_into_each_other():
    ax = orders(600, repeated=range(101, 151)).plot().figure.axes[0]
    FigureCanvasAgg(ax.figure).draw()
    dots, pluses = ([ax.transData.transform((x, 0))[0] for x in named(ax, gid)[0].get_xdata()] for gid in ("mark repeated", "more"))
    assert len(dots) == len(pluses) > 2
    wide = 6 * ax.figure.dpi / 72                     # the size of a mark, in pixels
    assert all(dot - plus >= 0.9 * wide for plus, dot in zip(pluses, dots[1:]))
    assert len(named(orders(40, repeated={3, 4, 5}).plot().figure.axes[0], "mark repeated")[0].get_xdata()) == 3


def test_one_odd_key_among_thousands_is_drawn_and_named():
    run = many(3000, {1234}, {2345})
    picture = run.plot()
    effects = [bar.get_height() for bar in picture.figure.axes[0].patches if bar.get_gid() == "effects"]
    assert len(effects) == 200 and effects.count(-2) == 1 and effects.count(0) == 1
    assert "each pair of bars is the oddest of 15 keys" in picture.figure.axes[0].get_xlabel()
    assert "1 duplicated: invoice-1234:reminder; 1 lost: invoice-2345:reminder; 2,998 once" in picture.alternative


def test_few_keys_are_drawn_as_the_trail_of_the_most_telling_one():
    assert repr(many(3, {2}).plot()).startswith("Trail of invoice-2:reminder: 2 deliveries, 2 effects, duplicated")
    assert repr(many(7, {2}).plot()).startswith("Deliveries against effects")


def test_queue_growth_counts_what_waits_and_what_is_in_a_handler():
    figure = plots.queue_growth(many(30, {3})).figure
    main = figure.axes[0]
    in_flight, = named(main, "in flight")
    ready, = named(main, "ready at the moment")
    together = set(zip(ready.get_ydata(), in_flight.get_ydata()))
    assert {(30, 0), (29, 1), (29, 0), (0, 1), (0, 0)} <= together and (30, 1) not in together
    assert (ready.get_ydata()[-1], in_flight.get_ydata()[-1]) == (0, 0)
    assert count(main, "killed") == 1 and len(figure.axes) == 3


def test_watches_are_drawn_beside_each_other_on_one_scale_and_told_one_after_the_other():
    one, two = seen("1 worker", 1, [(740.0, "killed")]), seen("2 workers", 2)
    picture = one.plot(two)
    columns = [picture.figure.axes[at::2] for at in (0, 1)]
    for left, right in zip(*columns):
        assert left.get_ylim() == right.get_ylim() and left.get_xlim() == right.get_xlim()
    for (main, *_), watch in zip(columns, (one, two)):
        assert named(main, "title")[0].get_text() == watch.name
        assert list(named(main, "ready at the moment")[0].get_ydata()) == [sample.ready for sample in watch.samples]
        assert named(main, "ready at the moment")[0].get_xdata()[0] == pytest.approx(0.06)
    assert count(columns[0][0], "killed") == 1 and x_of(named(columns[0][0], "killed")[0]) == pytest.approx(0.7) and not count(columns[1][0], "killed")
    assert [label.get_text() for label in named(columns[0][1], "label")] == ["confirmed", "settled"] and not count(columns[1][1], "label")
    assert repr(picture).startswith("Queue growth: 1 worker: 30 samples in 2.9 s, until the run was over; at most 139 ready, the oldest 0.9 s old, "
                                    "200 confirmed and 90 settled; 1 fault on the axis of time. 2 workers: 30 samples")


def test_where_the_broker_did_not_answer_the_curve_has_a_hole():
    ready = named(seen("one", 1, hole=(11, 12)).plot().figure.axes[0], "ready at the moment")[0].get_ydata()
    assert [at for at, value in enumerate(ready) if value != value] == [11, 12]


def test_what_is_delivered_is_drawn_where_it_is_much_more_than_there_is():
    for repeats, drawn in ((1, 0), (9, 1)):
        assert count(seen("one", 3, repeats=repeats).plot().figure.axes[1], "delivered") == drawn


@pytest.mark.parametrize("word", ["confirmed", "settled"])
def test_the_rates_of_a_watch_add_up_to_what_came_after_its_first_sample(word):
    watch = seen("one", 1)
    rate, edges, _ = named(watch.plot().figure.axes[1], word)[0].get_data()
    first, last = ([sample.arrivals, sample.services][word == "settled"] for sample in (watch.samples[0], watch.samples[-1]))
    assert round(sum(rate * (edges[1:] - edges[:-1]))) == last - first


@pytest.mark.parametrize("word", ["confirmed", "settled"])
def test_the_rates_add_up_to_the_messages(word):
    rate, edges, _ = named(plots.queue_growth(many(30, {3})).figure.axes[1], word)[0].get_data()
    assert round(sum(rate * (edges[1:] - edges[:-1])) / 1000) == 30                   # a second, over milliseconds


def test_retention_shows_both_ends_with_colour_mark_and_word():
    picture = plots.retention(forgetting())
    above, below = picture.figure.axes
    assert [bar.get_height() for bar in above.patches] == [5, 3, 0, 0] and [bar.get_height() for bar in below.patches] == [1, 2, 5, 8]
    assert {to_hex(bar.get_facecolor()).upper() for bar in above.patches} == {LOOKS["duplicated"].colour}
    assert [text.get_text() for text in named(above, "number")] == ["5 repeated", "3 repeated", "none repeated", "none repeated"]
    assert sorted(set(named(above, "mark once")[0].get_xdata())) == [2, 3] and len(named(above, "mark duplicated")[0].get_xdata()) == 2 * 2
    assert [label.get_text() for label in below.get_xticklabels()] == ["1", "2", "5", "all"]
    assert repr(picture) == (
        "The price of remembering: with 2 keys kept, 3 effects happened again; with 5 keys, none. 1 kept – 5 effects repeated, 1 row; "
        "2 kept – 3 effects repeated, 2 rows; 5 kept – 0 effects repeated, 5 rows; all kept – 0 effects repeated, 8 rows.")


def test_retention_says_so_where_no_limit_was_long_enough_or_each_was():
    def title(runs):
        return named(plots.retention(runs).figure.axes[0], "title")[0].get_text()
    assert title(forgetting()[1:3]) == "with 2 keys kept, 3 effects still happened again"
    assert title(forgetting()[3:]) == "no effect was repeated, however many keys were kept"
    with pytest.raises(PlanError, match="no run"):
        plots.retention([])


def test_the_provider_has_a_lane_where_a_run_called_it_with_a_mark_for_each_charge():
    axes = tape.charged_twice().plot().figure.axes[0]
    assert [lane.get_text() for lane in named(axes, "lane")] == ["broker", "worker 1", "ledger", "provider"]
    calls, charges = named(axes, "call"), named(axes, "charge")
    assert [charge.get_xdata()[0] for charge in charges] == [call.xy[0] for call in calls]
    assert [same_color(charge.get_color(), LOOKS[status].colour) for charge, status in zip(charges, ("once", "duplicated"))] == [True, True]
    assert len(named(axes, "effect")) == 1 and "charge, charged again" in tape.charged_twice().plot().alternative
    assert "provider" not in [lane.get_text() for lane in named(tape.duplicated().plot().figure.axes[0], "lane")]


def test_a_call_without_an_answer_is_a_broken_arrow_whether_it_was_charged_or_not():
    picture = tape.charged_unheard().plot()
    axes = picture.figure.axes[0]
    broken, charges = named(axes, "broken arrow"), named(axes, "charge")
    refused, in_time, too_late = [arrow.get_xdata()[0] for arrow in broken]
    assert [mark.get_xdata()[0] for mark in named(axes, "dropped")] == [refused]
    assert [mark.get_position()[0] for mark in named(axes, "mark unknown")] == [in_time, too_late]
    assert charges[0].get_xdata()[0] == in_time and charges[1].get_xdata()[0] > too_late and len(charges) == 2
    assert len(named(axes, "call")) == 1
    for words in ("charge, refused", "charge, answer 429", "charge, charged, no answer", "charge, no answer", "charged, again"):
        assert words in picture.alternative


def test_with_axes_given_a_picture_is_drawn_there_and_they_are_returned():
    for draw in (tape.duplicated().plot, tape.once().trail(KEY).plot, tape.late().plot, many(8).plot, lambda ax: plots.queue_growth(many(8), ax=ax),
                 lambda ax: plots.retention(forgetting(), ax)):
        ax = Figure().add_subplot()
        assert draw(ax=ax) is ax and ax.has_data()
        assert len(ax.figure.axes) == 1


def test_the_same_run_gives_the_same_bytes_whatever_the_notebook_has_set():
    first = tape.duplicated().plot().png
    with matplotlib.rc_context({"font.size": 20, "figure.facecolor": "black", "savefig.facecolor": "red", "path.sketch": (5, 100, 1)}):
        assert tape.duplicated().plot().png == first
    assert matplotlib.rcParams["figure.facecolor"] == "white"


def test_a_small_mark_keeps_its_colour_in_the_small_image():
    for run, status in ((tape.lost(), "lost"), (tape.terminal(), "terminal"), (frozen(), "pending"), (tape.stray(), "stray"), (tape.repeated(), "repeated"),
                        (tape.nothing(), "nothing")):
        colours = [colour for _, colour in PIL.Image.open(io.BytesIO(run.plot().png)).convert("RGB").getcolors(1 << 20)]
        wanted = bytes.fromhex(LOOKS[status].colour[1:])
        assert min(sum(abs(a - b) for a, b in zip(colour, wanted)) for colour in colours) < 12


def test_pictures_need_no_pyplot_and_words_need_no_matplotlib():
    code = ("import sys; from tests import tape; run = tape.duplicated(); repr(run), run._repr_html_(), repr(tape.late()), repr(run.trail('invoice-1:reminder'))\n"
            "assert 'matplotlib' not in sys.modules and 'pika' not in sys.modules\n"
            "run.plot().png\nassert 'matplotlib.pyplot' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.path.dirname(os.path.dirname(__file__)))


def test_a_key_in_any_script_is_drawn_without_a_warning(recwarn):
    assert Tape([Message("счёт-1:напоминание 請求書 🧾")]).handle().run([1]).plot().png
    assert not recwarn.list


def lanes_of(ax):
    return {text.get_text(): text.get_position()[1] for text in named(ax, "lane")}


def undrawn(figure):
    """Returns the labels of ticks beyond the ends of their axes, which matplotlib keeps and does not draw."""
    labels = []
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            labels += [label for tick in axis.get_major_ticks() for label in (tick.label1, tick.label2)
                       if not ax.axison or not low <= tick.get_loc() <= high]
            labels += [axis.label] * (not ax.axison)
    return labels


def test_a_copy_waits_on_the_brokers_lane_until_its_own_delivery_and_a_record_stands_on_the_ledgers():
    axes = tape.doubled().plot().figure.axes[0]
    delay, = named(axes, "delay")
    retry, deliveries = named(axes, "retry.publish"), named(axes, "delivery")
    assert delay.get_xdata()[0] == retry[0].xy[0] and delay.get_xdata()[1] == deliveries[-1].xy[0]        # not that of the redelivery in between
    assert "retry in 50 ms" in tape.doubled().plot().alternative
    record, = named(tape.used_up().plot().figure.axes[0], "terminal.record")
    assert same_color(record.get_color(), LOOKS["terminal"].colour) and "terminal.record: manual-review" in tape.used_up().plot().alternative


def named(ax, gid):
    return [artist for artist in ax.findobj(lambda artist: artist.get_gid() == gid)]


def count(ax, gid):
    return len(named(ax, gid))


def x_of(artist):
    return artist.get_xdata()[0] if hasattr(artist, "get_xdata") else artist.xy[0]
