"""What is PostgreSQL's alone: its connections and locks, the schemas that labs leave, what may be wrong with a URL."""
import json
import subprocess
import sys

import psycopg
import pytest

from labkit import Lab, LedgerError, PlanError
from labkit.databases import owner
from labkit.databases.postgres import PostgresHome
from tests import postgres
from tests.engine.handlers import once_then_ack
from tests.engine.test_live import until


@pytest.fixture(scope="module")
def place():
    home = PostgresHome(postgres.url())
    yield home.new()
    home.close()


def test_a_statement_that_waits_for_a_lock_ends_with_its_worker(monkeypatch):
    """Without PostgreSQL looking after its client, the statement would commit as soon as the lock is free: an effect of a dead worker."""
    monkeypatch.setattr("labkit.databases.postgres._SETTLE_MS", 3000)         # less than the statement itself would wait
    home = PostgresHome(postgres.url())
    place = home.new()
    code = ("import json, sys; from labkit import sql; from labkit.databases import connect;"
            "connect(json.loads(sys.argv[1]), False).execute(sql.RECORD, ('invoice-1:reminder', '{}'))")
    with psycopg.connect(postgres.url()) as other:
        other.execute(f"LOCK TABLE {place.schema}.effects IN EXCLUSIVE MODE")
        worker = subprocess.Popen([sys.executable, "-c", code, json.dumps(place.wire)])
        until(lambda: place.query("SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'RowExclusiveLock'") == [(1,)])
        worker.kill()
        worker.wait()
        assert place.settled("SELECT count(*) FROM effects") == [(0,)]
    assert place.query("SELECT count(*) FROM effects") == [(0,)]
    home.close()


@pytest.mark.parametrize("url, error", [
    ("mysql://x", PlanError), (7, PlanError), ("postgresql://lab:geheim@127.0.0.1:1/lab", LedgerError), ("postgresql://lab:geheim@[::1", PlanError),
    ("postgresql://lab:geheim@127.0.0.1/lab?nonsense=1", PlanError), ("postgresql://lab:geh@geheim@127.0.0.1/lab", PlanError),
    ("postgresql://lab:geh/geh@127.0.0.1/lab", PlanError), ("postgresql://lab:1/geh@127.0.0.1/lab", PlanError),
    ("postgresql://lab:geheim/lab", PlanError)])
def test_a_url_that_leads_nowhere_is_refused_without_its_password(broker, url, error):
    with pytest.raises(error) as caught:
        Lab(broker=broker, quiet=True, ledger=url)
    assert "geh" not in str(caught.value) + repr(caught.value) and caught.value.now


def schemas():
    with psycopg.connect(postgres.url()) as db:
        return {name for name, in db.execute("SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'labkit_')")}


@pytest.fixture(scope="module")
def strict():
    """A server with users that may not do all: each that a test logs in as has this one password."""
    server = postgres.another()
    with psycopg.connect(server.url, autocommit=True) as db:
        for user, more in (("lab_guarded", ""), ("lab_few", "CONNECTION LIMIT 0"), ("lab_bare", ""), ("lab_reader", "")):
            db.execute(f"CREATE ROLE {user} LOGIN {more} PASSWORD 'geheim'")
        db.execute("ALTER ROLE lab_reader SET default_transaction_read_only = on")
        db.execute("GRANT CREATE ON DATABASE lab TO lab_reader")
        db.execute("CREATE DATABASE closed")
        db.execute("REVOKE CONNECT ON DATABASE closed FROM PUBLIC")
    server.ask_for_a_password("lab_guarded")
    yield server
    server.remove()


@pytest.mark.parametrize("user, database, more, told, now", [
    ("lab_guarded:geheimer", "lab", "", "password authentication failed", "the right user and password"), ("lab_guarded", "lab", "", "no password", "the right user"),
    ("nobody", "lab", "", "role \"nobody\" does not exist", "the right user and password"), ("lab", "none", "", "does not exist", "Create that database"),
    ("lab_bare", "closed", "", "permission denied", "that this user may connect to"), ("lab_few", "lab", "", "too many connections", "Close what else"),
    ("lab_bare", "lab", "", "'lab_bare' may create no schema", 'GRANT CREATE ON DATABASE "lab" TO "lab_bare"'),
    ("lab_reader", "lab", "", "it is read-only", "Name one that can be written"),
    ("lab", "lab", "&options=-c%20client_connection_check_interval%3Dx", "older than 14", "PostgreSQL 14 or newer")])
def test_a_database_that_cannot_be_used_names_its_own_next_step(strict, user, database, more, told, now):
    with pytest.raises(LedgerError) as caught:
        PostgresHome(strict.url.replace("lab@/lab", f"{user}@/{database}") + more)
    assert told in caught.value.why and now in caught.value.now and "geheim" not in str(caught.value)


def test_a_statement_that_psycopg_refuses_is_no_lost_server(place):
    with pytest.raises(psycopg.ProgrammingError, match="placeholder"):
        place.query("SELECT ?")


def test_a_lab_removes_its_schemas_and_those_of_a_killed_kernel(broker):
    before = schemas()
    code = "import sys; from labkit.databases.postgres import PostgresHome as Home; print(Home(sys.argv[1]).new().schema, flush=True); sys.stdin.read()"
    kernel = subprocess.Popen([sys.executable, "-c", code, postgres.url()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    left = kernel.stdout.readline().strip()
    kernel.kill()
    kernel.communicate()
    until(lambda: not locks_of(left))                 # PostgreSQL notices the death a little later
    with Lab(broker=broker, quiet=True, ledger=postgres.url()) as lab:
        lab.run(once_then_ack, lab.reminders(1))
        assert left not in schemas()
        assert schemas() - before
    assert not schemas() - before


def locks_of(schema):
    with psycopg.connect(postgres.url()) as db:
        return db.execute("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = (hashtext(%s)::bigint & 4294967295)::oid",
                          (schema.rpartition("_")[0],)).fetchall()


def test_a_lab_whose_connection_broke_keeps_its_schemas_and_removes_them_itself():
    home = PostgresHome(postgres.url())
    place = home.new()
    with psycopg.connect(postgres.url()) as db:
        for pid, in locks_of(place.schema):
            db.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    assert not locks_of(place.schema)
    PostgresHome(postgres.url()).close()
    assert place.query("SELECT * FROM effects") == []
    home.close()
    assert place.schema not in schemas()


def test_closing_does_not_wait_for_a_stranger_who_reads_the_schemas(monkeypatch):
    monkeypatch.setattr("labkit.databases.postgres.BUSY_MS", 50)
    home = PostgresHome(postgres.url())
    read, free, other = (home.new().schema for _ in range(3))
    with psycopg.connect(postgres.url()) as stranger:
        for schema in (read, other):
            stranger.execute(f"SELECT * FROM {schema}.effects")
        home.close()
        assert {read, free, other} & schemas() == {read, other}
    with psycopg.connect(postgres.url(), autocommit=True) as db:
        for schema in (read, other):
            db.execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.mark.parametrize("statement, parameters, value", [
    ("SELECT '?' || ?", ("x",), "?x"), ("SELECT 'it''s ?' || ?", ("x",), "it's ?x"), ("SELECT E'it\\'s ?' || ?", ("x",), "it's ?x"),
    ("SELECT ? AS \"why?\"", ("x",), "x"), ("SELECT ? -- or ?\n || 'y'", ("x",), "xy"), ("SELECT /* or ? */ ?", ("x",), "x"),
    ("SELECT $$?$$ || ?", ("x",), "?x"), ("SELECT $a$?$$?$a$ || ?", ("x",), "?$$?x"), ("SELECT 7 % ?", (4,), 3),
    ("SELECT count(*) FROM (VALUES ('a%'), ('b?')) AS t (v) WHERE v LIKE '%?' OR v = ?", ("a%",), 2), ("SELECT '%s %(x)s %%'", (), "%s %(x)s %%")])
def test_a_question_mark_is_a_place_for_a_value_only_where_sql_reads_one(place, statement, parameters, value):
    assert place.query(statement, parameters) == [(value,)]


def test_a_schema_that_no_lab_signed_is_somebody_elses():
    with psycopg.connect(postgres.url(), autocommit=True) as db:
        for name in (theirs := ["labkit_mine", "labkit_000000000000_1"]):
            db.execute(f"CREATE SCHEMA {name}")
        PostgresHome(postgres.url()).close()
        assert schemas() >= set(theirs)
        for name in theirs:
            db.execute(f"DROP SCHEMA {name}")


@pytest.mark.parametrize("change, gone", [
    ({}, False), ({"born": "long ago"}, True), ({"process": 2 ** 22 + 1}, True), ({"lab": "another"}, False), ({"lab": "another", "made": 0}, True)])
def test_who_signed_a_schema_is_gone_when_that_very_process_has_ended_or_a_day_later_elsewhere(change, gone):
    assert owner.is_gone(json.dumps({**json.loads(owner.sign()), **change})) == gone
    assert not owner.is_gone(None) and not owner.is_gone("of mine") and not owner.is_gone("7")
