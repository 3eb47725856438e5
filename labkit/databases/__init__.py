"""Where ledgers are kept: an SQLite file each, or a schema each in a PostgreSQL database.

Both kinds offer the same three things. A home makes the ledgers of one lab, and removes what it must. A ledger's place
is what the kernel knows of it: it answers queries and travels to the workers as its `wire`. A connection is a worker's.
"""

import os
from typing import Any

from labkit.databases.sqlite import SqliteConnection, SqliteHome, SqlitePlace
from labkit.errors import PlanError

__all__ = ["SqlitePlace", "connect", "home"]

_SCHEMES = ("postgresql://", "postgres://")


def home(url: str | None, folder: str | os.PathLike):
    """Returns the home of a lab's ledgers: files in the folder, or schemas in the PostgreSQL database that the URL names.

    Raises PlanError for another URL, LedgerError when the database cannot be reached.
    """
    if url is None:
        return SqliteHome(folder)
    if not isinstance(url, str) or not url.startswith(_SCHEMES):
        raise PlanError("The ledger's URL names no database that labkit knows.", "it does not begin with postgresql://",
                        'Write Lab(ledger="postgresql://user:password@127.0.0.1/database"), or leave it out for SQLite.')
    from labkit.databases.postgres import PostgresHome
    return PostgresHome(url)


def connect(wire: dict[str, Any], stepped: bool):
    """Returns a worker's connection to the place that travelled as `wire`. In a stepped run it never waits for a lock."""
    if "path" in wire:
        return SqliteConnection(wire["path"], stepped)
    from labkit.databases.postgres_connection import PostgresConnection
    return PostgresConnection(wire["conninfo"], wire["schema"], stepped)
