"""Races: every order of two workers' steps, each forced and not hoped for."""
import math
import os

import pytest

from labkit import HandlerError, Message, PlanError, crash
from tests.engine.handlers import look_inside, look_then_record, once_then_ack


@pytest.fixture
def message(lab):
    return lab.reminders(1)[0]


def test_look_up_then_record_is_found_out_and_its_order_told(lab, message):
    race = lab.race(look_then_record, message)
    assert race.verdict == "broken"
    assert race.first_broken.told == ["A finds nothing", "B finds nothing", "A records", "B records"]
    assert race.why == "A finds nothing · B finds nothing · A records · B records: invoice-1:reminder was recorded 2 times (36 of 62 schedules are broken)"


def test_a_unique_key_holds_in_every_order(lab, message):
    race = lab.race(once_then_ack, message)
    assert (race.verdict, race.tried, race.total) == ("holds", 20, 20)
    assert race.counts["once"] == 20


def test_every_order_of_two_times_four_steps_is_tried_once(lab, message):
    def four_steps(delivery, shop):
        shop.ledger.find("a")
        shop.ledger.record_once(delivery.message.effect_key)
        delivery.ack()
    race = lab.race(four_steps, message)
    assert race.tried == len({schedule.order for schedule in race.schedules}) == math.comb(8, 4)


def test_a_worker_that_waits_for_the_others_lock_takes_no_step(lab, message):
    race = lab.race(look_inside, message)
    assert (race.verdict, race.counts["once"]) == ("holds", race.total)
    done = {tuple((event.lane, event.name) for event in schedule.run.events if event.phase == "after") for schedule in race.schedules}
    assert len(done) == race.total                    # no two of them differ by a wait only
    waited = next(schedule for schedule in race.schedules if "B waits for the lock" in schedule.told)
    between = waited.told[waited.told.index("B waits for the lock"):waited.told.index("A commits")]
    assert not [step for step in between if step.startswith("B") and "waits" not in step]


def move_first(delivery, shop):
    if shop.status.move("order-1", "new", "paid") == "moved":
        shop.ledger.record(delivery.message.effect_key)
    delivery.ack()


def test_a_race_for_a_record_and_one_that_publishes_again_are_told(lab, message):
    park = lab.race(lambda delivery, shop: delivery.park("?"), message)
    assert (park.verdict, park.schedules[0].told) == ("holds", ["A records it for a person"])        # B finds the record, and does not enter its handler
    assert ["A records it for a person", "B records it for a person"] in [schedule.told for schedule in park.schedules]

    def again(delivery, shop):
        if delivery.attempt < 3:
            delivery.republish(20)
        delivery.ack()
    assert lab.race(again, message, limit=1).schedules[0].told == ["A publishes again", "B publishes again"]


def test_a_race_of_moves_is_told(either):
    race = either.race(move_first, either.reminders(1)[0])
    assert (race.verdict, race.counts["once"]) == ("holds", race.total)
    assert race.schedules[0].told == ["A moves the status", "A records", "B does not move the status"]
    assert repr(race) and race._repr_html_() and repr(race.schedules[0])


def test_a_race_into_a_conflict_is_told(either):
    first, other = (Message("invoice-1:reminder", payload={"amount": amount}) for amount in (10, 20))
    race = either.race(once_then_ack, other, continue_from=either.run(once_then_ack, [first]), limit=2)
    assert race.schedules[0].told == ["A finds a conflict", "B finds a conflict"]
    assert "A finds a conflict" in repr(race.schedules[0]) and repr(race) and race._repr_html_()


def test_a_search_that_was_cut_off_proves_nothing_unless_it_found_a_break(lab, message):
    cut = lab.race(once_then_ack, message, limit=5)
    assert (cut.verdict, cut.tried, cut.total) == ("unknown", 5, None)
    assert "there are more" in cut.why
    assert lab.race(look_then_record, message, limit=30).verdict == "broken"


def test_the_same_seed_tries_the_same_orders(lab, message):
    def orders(seed):
        return [schedule.order for schedule in lab.race(once_then_ack, message, workers=3, limit=3, seed=seed).schedules]
    assert orders(1) == orders(1)
    assert orders(1) != orders(2)


def test_a_schedule_can_be_repeated(lab, message):
    broken = lab.race(look_then_record, message, limit=30).first_broken
    again = broken.replay()
    assert (again.order, again.told, again.run.why) == (broken.order, broken.told, broken.run.why)


def test_racers_are_two_processes(lab, message):
    def handler(delivery, shop):
        print(os.getpid())
        delivery.ack()
    race = lab.race(handler, message, limit=1)
    assert len(set(race.schedules[0].run.facts.printed.split())) == 2


def test_a_handler_that_leaves_it_to_chance_is_refused(lab, message):
    def by_chance(delivery, shop):
        for _ in range(os.urandom(1)[0] % 5):
            shop.ledger.find("a")
        delivery.ack()
    with pytest.raises(HandlerError, match="did not take the same steps"):
        lab.race(by_chance, message)


def test_a_worker_that_raises_while_racing_is_told(lab, message):
    def refuse(delivery, shop):
        raise ValueError("no")
    race = lab.race(refuse, message)
    assert race.counts["terminal"] == race.total


@pytest.mark.parametrize(("arguments", "told"), [
    ({"faults": [crash.after("ack")]}, "a race plans the order of the steps"), ({"order": (1, 2)}, "no argument 'order'"),
    ({"prefetch": 2}, "each worker holds one copy"), ({"acknowledge": "auto"}, "the ack is one of the steps"),
    ({"limits": 5}, "perhaps 'limit'"), ({"workers": 1}, "nobody to race with"), ({"workers": "2"}, "workers is '2'"), ({"limit": 0}, "limit is 0")])
def test_a_race_that_cannot_be_carried_out_is_refused(lab, message, arguments, told):
    with pytest.raises(PlanError, match=told):
        lab.race(once_then_ack, message, **arguments)
