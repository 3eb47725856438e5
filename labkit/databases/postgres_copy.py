"""A copy of a ledger that is kept in PostgreSQL: as another schema, to go on with, or as an SQLite file, to be kept.

The learner may have made tables of their own. What makes up a table travels, and so do views; what does not is named.
"""

import json
import sqlite3
from contextlib import closing
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier

from labkit import sql
from labkit.errors import LedgerError, PlanError

_HERE = "SELECT oid FROM pg_namespace WHERE nspname = %(schema)s"
_TABLES = f"SELECT relname FROM pg_class WHERE relnamespace = ({_HERE}) AND relkind = 'r' ORDER BY oid"
_NOT_COPIED = f"""
SELECT CASE relkind WHEN 'm' THEN 'the materialized view ' WHEN 'f' THEN 'the foreign table ' WHEN 'c' THEN 'the type ' ELSE 'the partitioned table ' END || relname
FROM pg_class WHERE relnamespace = ({_HERE}) AND relkind IN ('m', 'f', 'c', 'p')
UNION ALL SELECT 'the trigger ' || tgname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid WHERE relnamespace = ({_HERE}) AND NOT tgisinternal
UNION ALL SELECT 'the function ' || proname FROM pg_proc WHERE pronamespace = ({_HERE})
UNION ALL SELECT 'the type ' || typname FROM pg_type WHERE typnamespace = ({_HERE}) AND typtype IN ('e', 'd', 'r')
"""
_WRITTEN = "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum"
_COUNTERS = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = %(schema)s AND is_identity = 'YES'"
_SEQUENCES = f"""
SELECT relname, format_type(seqtypid, NULL), seqincrement, seqmin, seqmax, seqstart, seqcache, seqcycle, refobjid::regclass::text, attname
FROM pg_class JOIN pg_sequence ON seqrelid = pg_class.oid LEFT JOIN pg_depend ON objid = seqrelid AND classid = 'pg_class'::regclass AND deptype IN ('a', 'i')
LEFT JOIN pg_attribute ON attrelid = refobjid AND attnum = refobjsubid
WHERE relnamespace = ({_HERE}) AND deptype IS DISTINCT FROM 'i'
"""
#: what names other things of the schema, as a statement that reads the same in another: PostgreSQL leaves out the schema that is searched
_NAMING = [
    f"""SELECT format('ALTER TABLE %%I ALTER %%I SET DEFAULT %%s', relname, attname, pg_get_expr(adbin, adrelid))
    FROM pg_attrdef JOIN pg_class ON pg_class.oid = adrelid JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
    WHERE relnamespace = ({_HERE}) AND relkind = 'r' AND attgenerated = ''""",
    f"""SELECT format('ALTER TABLE %%I ADD CONSTRAINT %%I %%s', relname, conname, pg_get_constraintdef(pg_constraint.oid))
    FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid WHERE connamespace = ({_HERE}) AND contype = 'f'""",
    f"""SELECT format('CREATE VIEW %%I AS %%s', relname, pg_get_viewdef(oid)) FROM pg_class WHERE relnamespace = ({_HERE}) AND relkind = 'v' ORDER BY oid""",
]


def into_schema(db: psycopg.Connection, old: str, new: str) -> None:
    """Copies the schema into another, which is empty, within the transaction that is open. Raises PlanError, or LedgerError when it is away."""
    here = {"schema": old}
    tables = _tables_of(db, old, "Use a run of a lab that is open.")
    if found := db.execute(_NOT_COPIED, here).fetchone():
        raise PlanError(f"This ledger cannot go on: it holds {found[0]}.", "labkit copies tables, sequences and views, and nothing else that a handler makes",
                        "Go on from a run without it, or make it in the handler where it is not there.")
    _search(db, old)
    sequences, naming = db.execute(_SEQUENCES, here).fetchall(), [statement for what in _NAMING for statement, in db.execute(what, here).fetchall()]
    for table in tables:
        db.execute(SQL("CREATE TABLE {} (LIKE {} INCLUDING ALL)").format(Identifier(new, table), Identifier(old, table)))
        columns = SQL(", ").join(Identifier(name) for name, in db.execute(_WRITTEN, (Identifier(old, table).as_string(db),)))
        db.execute(SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {}").format(Identifier(new, table), columns, columns, Identifier(old, table)))
    _search(db, new)
    for name, kind, step, least, most, start, cache, cycle, table, column in sequences:
        db.execute(SQL("CREATE SEQUENCE {} AS {} INCREMENT {} MINVALUE {} MAXVALUE {} START {} CACHE {} {} OWNED BY {}").format(
            Identifier(name), SQL(kind), step, least, most, start, cache, SQL("CYCLE" if cycle else "NO CYCLE"),
            SQL(f"{table}.{{}}").format(Identifier(column)) if table else SQL("NONE")))
        db.execute(SQL("SELECT setval({}, last_value, is_called) FROM {}").format(Identifier(name).as_string(db), Identifier(old, name)))
    for statement in naming:
        db.execute(statement)
    for table, column in db.execute(_COUNTERS, {"schema": new}).fetchall():
        db.execute(SQL("SELECT setval(pg_get_serial_sequence({}, {}), coalesce(max({}), 0) + 1, false) FROM {}").format(
            Identifier(new, table).as_string(db), column, Identifier(column), Identifier(new, table)))


def into_file(db: psycopg.Connection, schema: str, path: Any) -> None:
    """Copies the tables of the schema into a new SQLite file. Raises LedgerError when it is away."""
    tables = _tables_of(db, schema, "Save a run while its lab is open.")
    with closing(sqlite3.connect(path)) as new, new:
        new.executescript(sql.SCHEMA)
        for table in tables:
            kept = db.execute(SQL("SELECT * FROM {}").format(Identifier(schema, table)))
            given = [_quoted(column.name) for column in kept.description]
            new.execute(f'CREATE TABLE IF NOT EXISTS {_quoted(table)} ({", ".join(given)})')
            there = {_quoted(name) for _, name, *_ in new.execute(f"PRAGMA table_info({_quoted(table)})")}
            for column in given:
                if column not in there:
                    new.execute(f"ALTER TABLE {_quoted(table)} ADD COLUMN {column}")
            new.executemany(f'INSERT INTO {_quoted(table)} ({", ".join(given)}) VALUES ({", ".join("?" * len(given))})',
                            ([_for_sqlite(value) for value in row] for row in kept))


def _tables_of(db: psycopg.Connection, schema: str, now: str) -> list[str]:
    if not (tables := db.execute(_TABLES, {"schema": schema}).fetchall()):
        raise LedgerError("The ledger is away.", "its lab was closed, which removes it", now)
    return [table for table, in tables]


def _search(db: psycopg.Connection, schema: str) -> None:
    db.execute(SQL("SET LOCAL search_path TO {}").format(Identifier(schema)))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _for_sqlite(value: Any) -> Any:
    """Returns the value as SQLite can keep it."""
    if value is None or isinstance(value, (int, float, str, bytes)):
        return value
    return json.dumps(value, default=str) if isinstance(value, (dict, list)) else str(value)
