"""The trail of an order: what names it, and what belongs to it on the lanes of producers and relays; the consumers' trails are in test_report."""
import pytest

from labkit.faults import crash
from tests import tape
from tests.tape import Produced


def told(run, key="order-1", lane=None):
    return [(row["what"], row["outcome"]) for row in run.trail(key).rows if lane in (None, row["lane"])]


def names(run, key="order-1", lane=None):
    return [what for what, _ in told(run, key, lane)]


def test_an_order_that_is_not_committed_yet_is_followed_by_its_commit_and_no_attempt_is_told():
    assert repr(tape.repeated().trail("order-1")) == """\
order-1: order, 2 events, repeated
lane        what           outcome
producer 1  ledger.begin   done
producer 1  ledger.record  recorded, not committed yet
producer 1  outbox.add     added, not committed yet
producer 1  ledger.commit  done
producer 1  returned
relay 1     ledger.begin   done
relay 1     outbox.read    1 waiting
relay 1     publish        sent
relay 1     confirm        confirmed
relay 1     killed         by crash.after('confirm', worker='relay')
relay 1     ledger.begin   done
relay 1     outbox.read    1 waiting
relay 1     publish        sent
relay 1     confirm        confirmed
relay 1     outbox.mark    done
relay 1     ledger.commit  done
relay 1     returned"""
    assert "attempt" not in tape.repeated().trail("order-1")._repr_html_()


def test_a_commit_that_was_reached_and_not_done_belongs_to_the_order():
    assert told(tape.stray())[-2:] == [("ledger.commit", "reached"), ("killed", "by crash.before('ledger.commit')")]


def test_a_rollback_belongs_to_the_order_with_the_error_that_made_it():
    run = Produced().step("ledger.begin").step("ledger.record", "order-1").step("ledger.rollback").note("raised", error="ValueError: no", frames=[]).run()
    assert told(run)[-2:] == [("ledger.rollback", "done"), ("raised", "ValueError: no")]


def test_a_transaction_is_told_in_the_trail_of_each_order_in_it_and_in_no_other():
    run = Produced().order("order-1", "order-2").order("order-3").run("order-1", "order-2", "order-3")
    for key in run.statuses:
        assert names(run, key) == ["ledger.begin", "ledger.record", "ledger.commit"]


def test_a_transaction_by_statements_of_ones_own_belongs_to_the_order_and_a_question_before_it_does_not():
    tape_ = Produced().step("ledger.execute", statement="SELECT 1").step("ledger.execute", statement="BEGIN IMMEDIATE").step("ledger.record", "order-1")
    run = tape_.step("ledger.execute", statement="UPDATE stock SET n = 1").step("ledger.execute", statement="COMMIT").run("order-1")
    assert told(run) == [("ledger.execute", "BEGIN IMMEDIATE"), ("ledger.record", "recorded, not committed yet"),
                         ("ledger.execute", "UPDATE stock SET n = 1"), ("ledger.execute", "COMMIT")]


def test_a_pass_that_published_nothing_of_the_order_is_not_told():
    run = Produced().order("order-1", outbox=True).pass_on("order-1").pass_on("order-2").pass_on(waiting=0).run("order-1", "order-2")
    assert names(run, lane="relay 1").count("outbox.read") == 1


def test_a_look_into_the_outbox_without_a_transaction_belongs_to_each_order_that_it_led_to():
    tape_ = Produced().order("order-1", "order-2", "order-3", outbox=True).by("relay 1").step("outbox.read", outcome="2 waiting")
    for key in ("order-1", "order-2"):
        tape_.publish(key).step("ledger.begin").step("outbox.mark", key).step("ledger.commit")
    run = tape_.run("order-1", "order-2", "order-3", outbox={"order-3": 1})
    for key in ("order-1", "order-2"):
        assert names(run, key, "relay 1") == ["outbox.read", "publish", "confirm", "ledger.begin", "outbox.mark", "ledger.commit"]
    assert names(run, "order-3", "relay 1") == []


def test_a_kill_is_told_in_the_trail_of_each_order_that_the_producer_had_begun_and_not_of_those_before_it_returned():
    run = Produced().order("order-1").order("order-2").kill(crash.after("ledger.commit", nth=2)).run("order-1", "order-2")
    assert names(run, "order-1")[-1] == names(run, "order-2")[-1] == "killed"
    assert names(run, "order-1").count("ledger.begin") == 1
    other = Produced().order("order-1", outbox=True).pass_on("order-1").step("ledger.begin").kill(crash.before("outbox.read", worker="relay", nth=2))
    assert names(other.run("order-1"), lane="relay 1")[-2:] == ["ledger.commit", "returned"]


@pytest.mark.parametrize("step, told_of_it", [("ledger.begin", ["ledger.begin", "killed"]), ("outbox.read", ["ledger.begin", "outbox.read", "killed"])])
def test_a_relay_that_dies_while_the_event_waits_is_told_though_it_did_nothing_with_it_yet(step, told_of_it):
    tape_ = Produced().order("order-1", outbox=True).by("relay 1")
    if step == "outbox.read":
        tape_.step("ledger.begin")
    run = tape_.reach(step).kill(crash.before(step, worker="relay")).pass_on("order-1").run("order-1")
    assert names(run, lane="relay 1")[:len(told_of_it) + 1] == [*told_of_it, "ledger.begin"]


def test_an_error_of_a_relay_while_the_event_waits_is_told_with_the_look_that_it_undid():
    tape_ = Produced().order("order-1", "order-2", outbox=True).by("relay 1").step("ledger.begin").step("outbox.read", outcome="2 waiting")
    tape_.step("publish", "order-1", phase="failed", error="TimeoutError: slow").step("ledger.rollback").note("raised", error="TimeoutError: slow", frames=[])
    run = tape_.pass_on("order-1", "order-2").run("order-1", "order-2")
    assert names(run, "order-2", "relay 1")[:5] == ["ledger.begin", "outbox.read", "ledger.rollback", "raised", "ledger.begin"]
    assert names(run, "order-2", "relay 1").count("publish") == 1


def test_what_a_relay_undid_and_went_on_from_leads_to_nothing_that_follows():
    tape_ = Produced().order("order-1", outbox=True).by("relay 1").step("ledger.begin").step("ledger.rollback")
    assert names(tape_.publish("order-1").run("order-1", outbox={"order-1": 1}), lane="relay 1") == ["publish", "confirm"]
    tape_ = Produced().order("order-1", outbox=True).by("relay 1").step("ledger.begin").step("ledger.rollback").step("outbox.read", outcome="1 waiting")
    assert names(tape_.kill("hand").run("order-1", outbox={"order-1": 1}), lane="relay 1") == ["outbox.read", "killed"]


def test_what_was_added_and_undone_does_not_wait_and_what_was_marked_and_undone_does():
    undone = Produced().step("ledger.begin").step("ledger.record", "order-1").step("outbox.add", "order-1", "added").step("ledger.rollback")
    assert names(undone.by("relay 1").step("ledger.begin").kill("hand").run(), lane="relay 1") == []
    marked = Produced().order("order-1", outbox=True).by("relay 1").step("ledger.begin").step("outbox.read", outcome="1 waiting").publish("order-1")
    marked.step("outbox.mark", "order-1").kill(crash.after("outbox.mark", worker="relay")).step("ledger.begin").kill("hand")
    assert names(marked.run("order-1", outbox={"order-1": 1}), lane="relay 1")[-2:] == ["ledger.begin", "killed"]


def test_a_freeze_and_an_exit_belong_to_the_order_even_after_an_error():
    tape_ = Produced().order("order-1").reach("publish", "order-1").note("stopped", by="hang.at('publish')").note("continued")
    run = tape_.note("raised", error="SystemExit: 1", frames=[]).note("exited", status=1).run("order-1")
    assert names(run)[-5:] == ["publish", "stopped", "continued", "raised", "exited"]


def test_a_relay_that_was_called_again_after_an_error_has_nothing_more_to_do_with_the_order():
    tape_ = Produced().order("order-1", outbox=True).by("relay 1").step("outbox.read", outcome="1 waiting").publish("order-1")
    run = tape_.step("outbox.mark", "order-1").note("raised", error="ValueError: no", frames=[]).pass_on(waiting=0).run("order-1")
    assert names(run, lane="relay 1")[-2:] == ["outbox.mark", "raised"]


def test_the_confirm_of_all_that_was_sent_belongs_to_each_event_of_it():
    run = Produced().send("order-1").send("order-2").step("confirm", outcome="2 confirmed").send("order-3").run()
    for key in ("order-1", "order-2"):
        assert told(run, key) == [("publish", "sent"), ("confirm", "2 confirmed")]
    assert names(run, "order-3") == ["publish"]


def test_the_confirm_of_another_event_leaves_an_order_waiting_for_the_confirm_of_all_and_its_own_does_not():
    run = Produced().send("order-1").publish("order-2").send("order-1", "another").step("confirm", "order-1", "confirmed", "another")
    run = run.send("order-3").step("confirm", outcome="2 confirmed").step("confirm", outcome="").run()
    assert names(run, "order-1") == ["publish", "publish", "confirm", "confirm"] and told(run, "order-1")[-1] == ("confirm", "2 confirmed")
    assert names(run, "order-2") == ["publish", "confirm"] and names(run, "order-3") == ["publish", "confirm"]


@pytest.mark.parametrize("heard", ["in time", "early", "late"])
def test_a_dropped_confirm_stands_before_the_end_of_the_wait_for_it_whenever_it_was_heard_of(heard):
    run = heard_of("confirm.dropped", tape.confirm_dropped(), {"in time": 0, "early": -2, "late": 2}[heard])
    assert told(run)[-5:] == [("publish", "sent"), ("confirm", "reached"), ("confirm.dropped", ""), ("confirm", "unknown"), ("returned", "")]


@pytest.mark.parametrize("later", range(4))
def test_a_dropped_publish_stands_before_its_end_whenever_it_was_heard_of(later):
    run = heard_of("publish.dropped", Produced().order("order-1").publish_dropped("order-1").publish("order-1").run("order-1"), later)
    assert told(run)[-6:] == [("publish", "reached"), ("publish.dropped", ""), ("publish", "sent"), ("confirm", "unknown"),
                              ("publish", "sent"), ("confirm", "confirmed")]


def heard_of(name, run, later):
    """Moves what was heard of so many events later."""
    events = run.events
    dropped = next(event for event in events if event.name == name)
    at = events.index(dropped) + later
    events.remove(dropped)
    events.insert(at, dropped)
    for number, event in enumerate(events):
        object.__setattr__(event, "at_ms", float(number))
    return run


def test_a_retry_and_a_record_tell_their_delay_their_reason_and_their_route():
    assert told(tape.used_up(), "invoice-1:reminder", "worker 1") == [
        ("receive", "redelivered=False"), ("raised", "TimeoutError: slow (temporary)"), ("retry.publish", "confirmed, in 100 ms: TimeoutError"), ("ack", "sent"),
        ("receive", "redelivered=False"), ("raised", "TimeoutError: slow (temporary)"),
        ("terminal.record", "recorded, for manual-review: TimeoutError"), ("ack", "sent")]
