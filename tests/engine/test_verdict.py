"""The rules of status and verdict, on facts made by hand: what each combination of effects and copies means."""
import pytest
from hypothesis import given, strategies as st

from labkit import Message, PlanError, Run, STATUSES, crash
from labkit.facts import Facts
from labkit.trace import Event

WHERE = ["waiting", "delayed", "held", "rejected", "acked", "dead-lettered", "dropped", "vanished"]


def facts(**changes):
    given_ = dict(settings={}, planned=[], fired=[], effects={}, where={}, ending="over")
    return Facts(**{**given_, **changes})


def judged(effects, where, **changes):
    message = Message("invoice-1:reminder")
    published = Event(0, "broker", "published", "note", message.message_id, message.effect_key, 1)
    return Run([message], [published], facts(effects=effects, where={1: [where]}, **changes))


@pytest.mark.parametrize("effects, where, status, verdict", [
    (1, "acked", "once", "holds"),
    (2, "acked", "duplicated", "broken"),
    (2, "waiting", "duplicated", "broken"),
    (0, "acked", "lost", "broken"),
    (0, "dropped", "lost", "broken"),
    (0, "vanished", "lost", "broken"),
    (0, "dead-lettered", "terminal", "holds"),
    (1, "dead-lettered", "once", "holds"),
    (0, "waiting", "pending", "unknown"),
    (1, "waiting", "pending", "unknown"),
    (1, "held", "pending", "unknown"),
])
def test_each_key_has_one_status_by_its_own_rule(effects, where, status, verdict):
    run = judged({"invoice-1:reminder": effects} if effects else {}, where)
    assert (run.statuses, run.verdict) == ({"invoice-1:reminder": status}, verdict)


@pytest.mark.parametrize("changes", [{"effects": None}, {"where": None}])
def test_what_could_not_be_asked_is_unknown(changes):
    run = Run([Message("a"), Message("b")], [], facts(**changes))
    assert (run.counts["unknown"], run.verdict) == (2, "unknown")


def test_a_broken_promise_outweighs_a_fault_that_did_not_fire():
    plan = [str(crash.after("ack"))]
    assert judged({"invoice-1:reminder": 2}, "acked", planned=plan, fired=[0]).verdict == "broken"
    assert judged({"invoice-1:reminder": 1}, "acked", planned=plan, fired=[0]).verdict == "unknown"
    assert judged({"invoice-1:reminder": 1}, "acked", planned=plan, fired=[1]).verdict == "holds"


@pytest.mark.parametrize("ending, verdict", [("over", "holds"), ("deadline", "unknown"), ("stopped", "unknown"), ("unreachable", "unknown"),
                                             ("max_deliveries", "broken"), ("gave up", "broken")])
def test_how_a_run_ended_counts(ending, verdict):
    assert judged({"invoice-1:reminder": 1}, "acked", ending=ending, reason="as said").verdict == verdict


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(WHERE)), max_size=8), st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3)))
def test_the_statuses_add_up_to_the_keys_whatever_happened(copies, effects):
    run = Run([Message(key) for key, _ in copies], [], facts(effects=effects, where={n: [where] for n, (_, where) in enumerate(copies, 1)}))
    assert sum(run.counts[status] for status in STATUSES) == run.counts["keys"] == len({key for key, _ in copies})
    assert run.counts["effects"] + run.counts["stray"] == sum(effects.values())


def test_the_evidence_is_the_shortest_list_of_events_that_shows_it(lab):
    from tests.engine import handlers
    fault = crash.after("ledger.record", message=2)
    run = lab.run(handlers.effect_then_ack, lab.reminders(3), faults=[fault])
    told = [(event.name, event.position) for event in run.evidence]
    assert told == [("ledger.record", 2), ("killed", 2), ("ledger.record", 2)]


def test_a_saved_run_is_judged_again_without_a_broker(lab, tmp_path):
    from tests.engine import handlers
    run = lab.run(handlers.effect_then_ack, lab.reminders(3), faults=[crash.after("ledger.record", message=2)])
    again = Run.load(run.save(tmp_path / "saved"))
    assert (again.counts, again.verdict, again.why, again.events) == (run.counts, run.verdict, run.why, run.events)
    with pytest.raises(PlanError, match="not empty"):
        run.save(tmp_path / "saved")
    with pytest.raises(PlanError, match="no saved run"):
        Run.load(tmp_path)
