"""The sweep: every crash point once, and with depth 2 the steps that only the recovery takes."""
import pytest

from labkit import PlanError, RetryPolicy
from tests import tape
from tests.engine import handlers


def table(sweep):
    return {row.point: row.status for row in sweep.rows}


def test_each_crash_point_of_ack_late(lab):
    sweep = lab.sweep(handlers.effect_then_ack, lab.reminders(1))
    assert table(sweep) == {
        "no crash": "once", "before receive": "once", "after receive": "once", "before ledger.record": "once",
        "after ledger.record": "duplicated", "before ack": "duplicated", "after ack": "once"}
    assert sweep.verdict == "broken"
    assert sweep.why == "after ledger.record: invoice-1:reminder was recorded 2 times (2 of 6 crash points are broken)"


def test_each_crash_point_of_ack_early(lab):
    assert table(lab.sweep(handlers.ack_then_effect, lab.reminders(1))) == {
        "no crash": "once", "before receive": "once", "after receive": "once", "before ack": "once",
        "after ack": "lost", "before ledger.record": "lost", "after ledger.record": "once"}


def test_a_unique_key_holds_at_every_crash_point(lab):
    sweep = lab.sweep(handlers.once_then_ack, lab.reminders(1))
    assert (sweep.verdict, set(table(sweep).values()), len(sweep.rows)) == ("holds", {"once"}, 7)


def find_first(delivery, shop):
    if shop.ledger.find(delivery.message.effect_key):
        delivery.reject()
    else:
        shop.ledger.record(delivery.message.effect_key)
        delivery.ack()


def effect_then_error(delivery, shop):
    shop.ledger.record(delivery.message.effect_key)
    raise ValueError("no stamps left")


def test_each_crash_point_of_a_handler_that_raises_is_reached(lab):
    sweep = lab.sweep(effect_then_error, lab.reminders(1))
    assert table(sweep) == {
        "no crash": "once", "before receive": "once", "after receive": "once", "before ledger.record": "once",
        "after ledger.record": "duplicated", "before reject": "duplicated", "after reject": "once"}
    assert all(row.run.facts.fired == [1] for row in sweep.rows[1:])


def test_depth_two_kills_again_where_only_the_recovery_goes(lab):
    sweep = lab.sweep(find_first, lab.reminders(1), depth=2)
    assert {row.point for row in sweep.rows if len(row.faults) == 2} == {
        "after ledger.record, then before reject", "after ledger.record, then after reject",
        "before ack, then before reject", "before ack, then after reject"}
    assert all(row.run.facts.fired == [1] * len(row.faults) for row in sweep.rows)


def test_a_sweep_without_a_crash_point_proves_nothing():
    sweep = tape.sweep("no step", no_crash=tape.Tape().run([1]))
    assert (sweep.verdict, sweep.why) == ("unknown", "the run without a crash showed no step, so there was no crash point to try")


@pytest.mark.parametrize(("messages", "arguments", "told"), [
    (0, {}, "There is no message to sweep with"), (1, {"faults": []}, "a sweep plans the faults itself"),
    (1, {"dept": 2}, "no argument 'dept'.\nLikely cause: perhaps 'depth'"), (1, {"depth": 3}, "depth is 3")])
def test_a_sweep_that_cannot_be_carried_out_is_refused(lab, messages, arguments, told):
    with pytest.raises(PlanError, match=told):
        lab.sweep(handlers.once_then_ack, lab.reminders(messages), **arguments)


def test_the_steps_of_every_attempt_are_swept(lab):
    def at_the_third(delivery, shop):
        if delivery.attempt < 3:
            raise TimeoutError
        shop.ledger.record_once(delivery.message.effect_key)
        delivery.ack()
    sweep = lab.sweep(at_the_third, lab.reminders(1), retry=RetryPolicy(delays_ms=(10,), jitter=0))
    assert [row.point for row in sweep.rows[1::2]] == [
        "before receive", "before retry.publish", "before ack", "before receive of attempt 2", "before retry.publish of attempt 2", "before ack of attempt 2",
        "before receive of attempt 3", "before ledger.record_once of attempt 3", "before ack of attempt 3"]
    assert all(row.run.facts.fired == [1] for row in sweep.rows[1:]) and sweep.verdict == "holds"
