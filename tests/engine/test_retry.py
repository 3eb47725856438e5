"""The retry policy: pure rules, for any failure, any attempt and any age."""
import http.client
import json
import sqlite3
import urllib.error

import pika.exceptions
import psycopg
import pytest
from hypothesis import given, strategies as st

from labkit import LedgerError, Message, PlanError
from labkit.message import Unreadable
from labkit.retry import BrokenRule, BusinessOutcome, Defer, KINDS, Publish, Retry, RetryPolicy, Terminal, UnknownSchema, classify

policies = st.integers(1, 8).flatmap(lambda attempts: st.builds(
    RetryPolicy, max_attempts=st.just(attempts), delays_ms=st.lists(st.integers(1, 10_000), min_size=min(1, attempts - 1), max_size=attempts - 1),
    jitter=st.floats(0, 0.99), max_age_ms=st.none() | st.integers(1, 60_000), seed=st.integers(0, 9)))
kinds = st.sampled_from(list(KINDS))


@given(policies, st.text(), st.floats(0, 1_000))
def test_a_failure_that_stays_temporary_is_tried_as_often_as_the_budget_says_and_waits_one_time_less(policy, key, work_ms):
    attempt, age_ms, delays = 1, work_ms, []
    while isinstance(action := policy.next_action("temporary", attempt, age_ms, key), Retry):
        delays.append(action.delay_ms)
        attempt, age_ms = attempt + 1, age_ms + action.delay_ms + work_ms
    assert action == Terminal("manual-review")
    assert attempt <= policy.max_attempts and len(delays) == attempt - 1
    if policy.max_age_ms is None:
        assert attempt == policy.max_attempts
    else:
        assert sum(delays) + work_ms * len(delays) <= policy.max_age_ms or not delays


@given(policies, st.integers(1, 7), st.text())
def test_a_delay_stays_within_its_jitter_and_is_one_of_few(policy, attempt, key):
    action = policy.next_action("temporary", attempt, 0, key)
    if isinstance(action, Retry):
        planned = policy.delays_ms[min(attempt, len(policy.delays_ms)) - 1]
        assert planned * (1 - policy.jitter) - 0.5 <= action.delay_ms <= planned * (1 + policy.jitter) + 0.5
        assert action.delay_ms in policy.tiers_ms(attempt) and 1 <= len(policy.tiers_ms(attempt)) <= 5
        assert action == policy.next_action("temporary", attempt, 0, key)


@given(policies, kinds, st.integers(1, 20), st.floats(0, 100_000))
def test_every_failure_ends_in_exactly_one_way_and_only_what_is_temporary_is_tried_again(policy, kind, attempt, age_ms):
    action = policy.next_action(kind, attempt, age_ms)
    assert isinstance(action, {"business": Publish, "defer": Defer, "temporary": (Retry, Terminal)}.get(kind, Terminal))
    if isinstance(action, Terminal):
        assert action.route == policy.routes[kind]
    if attempt >= policy.max_attempts:
        assert not isinstance(action, Retry)


@given(policies, st.text(), st.floats(0, 1_000))
def test_no_message_is_longer_under_way_than_the_policy_says(policy, key, work_ms):
    attempt, age_ms = 1, work_ms
    while isinstance(action := policy.next_action("temporary", attempt, age_ms, key), Retry):
        attempt, age_ms = attempt + 1, age_ms + action.delay_ms + work_ms
    assert age_ms <= policy.longest_ms(work_ms) + 1e-6


@pytest.mark.parametrize(("delay_ms", "least", "most"), [(1, 1, 2), (24 * 60 * 60 * 1000, 1, 24 * 60 * 60 * 1000)])
def test_no_jitter_makes_a_delay_that_no_queue_can_have(delay_ms, least, most):
    tiers = RetryPolicy(max_attempts=2, delays_ms=(delay_ms,), jitter=0.99).tiers_ms(1)
    assert least <= tiers[0] <= tiers[-1] <= most


def test_who_asks_for_more_than_a_day_is_not_waited_for():
    assert RetryPolicy().next_action("temporary", 1, 0, at_least_ms=2 * 24 * 60 * 60 * 1000) == Terminal("manual-review")


def test_jitter_spreads_what_failed_together():
    spread = {RetryPolicy().next_action("temporary", 1, 0, str(number)).delay_ms for number in range(50)}
    assert spread == {80, 90, 100, 110, 120}
    assert {RetryPolicy(jitter=0).next_action("temporary", 1, 0, str(number)).delay_ms for number in range(50)} == {100}


@pytest.mark.parametrize(("error", "kind"), [
    (ConnectionResetError(), "temporary"), (TimeoutError(), "temporary"), (LedgerError("away"), "temporary"), (sqlite3.OperationalError("locked"), "temporary"),
    (psycopg.OperationalError(), "temporary"), (psycopg.errors.UniqueViolation(), "unknown"), (pika.exceptions.StreamLostError(), "temporary"),
    (urllib.error.HTTPError("", 429, "", http.client.HTTPMessage(), None), "temporary"), (urllib.error.HTTPError("", 503, "", http.client.HTTPMessage(), None), "temporary"),
    (urllib.error.HTTPError("", 500, "", http.client.HTTPMessage(), None), "unknown"), (urllib.error.HTTPError("", 404, "", http.client.HTTPMessage(), None), "terminal"),
    (json.JSONDecodeError("", "", 0), "terminal"), (UnknownSchema("reminder.v9"), "terminal"), (KeyError("invoice"), "terminal"), (BrokenRule("no credit"), "terminal"),
    (BusinessOutcome("out of stock"), "business"), (ValueError("?"), "unknown"), (OSError("?"), "unknown"), (RuntimeError("?"), "unknown"), (Exception(), "unknown")])
def test_failures_are_classified_before_anything_is_tried_again_and_unknown_is_not_temporary(error, kind):
    assert classify(error) == kind


def test_a_body_that_is_no_message_is_terminal():
    for body in (b"{", b"\xff", b"[" * 100_000, b'{"effect_key": "a", "payload": {"n": ' + b"1" * 5000 + b"}}"):
        with pytest.raises(Unreadable) as caught:
            Message.from_wire(body, "id", None)
        assert classify(caught.value) == "terminal"


class Refused(Exception):
    pass


class CardRefused(Refused):
    pass


def test_errors_of_ones_own_are_mapped_by_their_class_or_by_a_function():
    by_class = RetryPolicy(kinds={Refused: "terminal", CardRefused: "temporary"})
    assert [by_class.classify(error) for error in (Refused(), CardRefused(), TimeoutError(), Exception())] == ["terminal", "temporary", "temporary", "unknown"]
    by_function = RetryPolicy(kinds=lambda error: "defer" if "gap" in str(error) else None)
    assert [by_function.classify(error) for error in (Exception("gap"), TimeoutError())] == ["defer", "temporary"]


def test_routes_replace_the_usual_ones():
    assert RetryPolicy(routes={"unknown": "on-call"}).routes == {"temporary": "manual-review", "terminal": "quarantine", "unknown": "on-call", "defer": "manual-review"}


@pytest.mark.parametrize(("arguments", "told"), [
    ({"max_attempts": 0}, "1 is the least"), ({"max_attempts": 2}, "2 attempts have 1 delay between them, not 2"), ({"delays_ms": (100, -1)}, "positive whole number"),
    ({"delays_ms": ()}, "positive whole number"), ({"delays_ms": "100"}, "delays_ms is '100'"), ({"max_attempts": 1}, r"1 attempt has no delay, not 2(.|\n)*Write delays_ms=\(\)"),
    ({"jitter": 1}, "jitter is 1"), ({"jitter": "much"}, "jitter is 'much'"), ({"max_age_ms": 0}, "max_age_ms is 0"), ({"routes": {"business": "x"}}, "routes names 'business'"),
    ({"kinds": {ValueError: "sometimes"}}, "is 'sometimes'"), ({"kinds": {ValueError: ["temporary"]}}, "none of temporary"),
    ({"kinds": {"KeyError": "terminal"}}, "kinds has 'KeyError'"), ({"kinds": None}, "kinds has None"),
    ({"kinds": {ValueError("no"): "terminal"}}, r"kinds has ValueError\('no'\)"), ({"kinds": ["terminal"]}, r"kinds has \['terminal'\]"),
    ({"routes": {"unknown": None}}, r"routes\['unknown'\] is None"), ({"routes": ["x"]}, "a dictionary is expected"),
    ({"delays_ms": (48 * 60 * 60 * 1000,)}, "which is a day")])
def test_a_policy_that_means_nothing_is_refused(arguments, told):
    with pytest.raises(PlanError, match=told):
        RetryPolicy(**arguments)


def test_a_kind_that_there_is_not_is_refused():
    with pytest.raises(PlanError, match="none of temporary, terminal"):
        RetryPolicy().next_action("sometimes", 1, 0)
    with pytest.raises(PlanError, match="none of temporary, terminal"):
        RetryPolicy(kinds=lambda error: "sometimes").classify(ValueError())
