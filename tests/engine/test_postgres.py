"""What is PostgreSQL's alone: its connections and locks, the schemas that labs leave, what may be wrong with a URL."""
import json
import subprocess
import sys
from decimal import Decimal

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


# -- going on with a ledger in which the learner has made something

def make(schema, *statements):
    with psycopg.connect(postgres.url(), options=f"-c search_path={schema}", autocommit=True) as db:
        return [db.execute(statement).fetchall() if "RETURNING" in statement else db.execute(statement) for statement in statements][-1]


_OWN = ["CREATE SEQUENCE invoice_number START 100 INCREMENT 5", "SELECT nextval('invoice_number')",
        """CREATE TABLE customers (id serial PRIMARY KEY, number integer DEFAULT nextval('invoice_number'), name text UNIQUE, "Loud one" text GENERATED ALWAYS AS (upper(name)) STORED)""",
        "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY, customer integer REFERENCES customers ON DELETE CASCADE, price numeric CHECK (price > 0))",
        "CREATE VIEW totals AS SELECT name, sum(price) AS total FROM orders JOIN customers ON customers.id = customer GROUP BY name",
        "CREATE VIEW large AS SELECT * FROM totals WHERE total > 10",
        "INSERT INTO customers (name) VALUES ('Ada'), ('Bob'), ('gone')", "DELETE FROM customers WHERE name = 'gone'", "INSERT INTO orders (customer, price) VALUES (1, 9.90), (1, 5), (2, 1)"]


@pytest.fixture
def home():
    home = PostgresHome(postgres.url())
    yield home
    home.close()


def test_a_copy_has_what_the_learner_made_and_leans_on_nothing_of_the_earlier_one(home):
    old = home.new()
    make(old.schema, *_OWN)
    new = home.new(old)
    make(old.schema, "DROP TABLE orders CASCADE", "DROP TABLE customers CASCADE", "DROP SEQUENCE invoice_number")
    assert new.query('SELECT id, number, name, "Loud one" FROM customers') == [(1, 105, "Ada", "ADA"), (2, 110, "Bob", "BOB")]
    assert make(new.schema, """INSERT INTO customers (name) VALUES ('Eve') RETURNING id, number, "Loud one" """) == [(4, 120, "EVE")]
    assert make(new.schema, "INSERT INTO orders (customer, price) VALUES (4, 20) RETURNING id") == [(4,)]
    assert new.query("SELECT name, total FROM large ORDER BY name") == [("Ada", Decimal("14.90")), ("Eve", 20)]
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        make(new.schema, "INSERT INTO orders (customer, price) VALUES (9, 1)")
    with pytest.raises(psycopg.errors.CheckViolation):
        make(new.schema, "INSERT INTO orders (customer, price) VALUES (1, 0)")
    make(new.schema, "DELETE FROM customers WHERE id = 1")
    assert new.query("SELECT count(*) FROM orders") == [(2,)]
    again = home.new(new)
    assert make(again.schema, "INSERT INTO customers (name) VALUES ('Mia') RETURNING id, number") == [(5, 125)]


@pytest.mark.parametrize("told, statements", [
    ("the materialized view kept", ["CREATE MATERIALIZED VIEW kept AS SELECT 1"]), ("the partitioned table parts", ["CREATE TABLE parts (n integer) PARTITION BY RANGE (n)"]),
    ("the type colour", ["CREATE TYPE colour AS ENUM ('red')"]), ("the type pair", ["CREATE TYPE pair AS (a integer, b integer)"]),
    ("the trigger|the function", ["CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
                                  "CREATE TRIGGER never AFTER INSERT ON effects FOR EACH ROW EXECUTE FUNCTION nothing()"])])
def test_a_ledger_that_cannot_be_copied_is_refused_and_leaves_no_half_copy(home, told, statements):
    old = home.new()
    make(old.schema, *statements)
    before = schemas()
    with pytest.raises(PlanError, match=f"it holds ({told})"):
        home.new(old)
    assert schemas() == before
