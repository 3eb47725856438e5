"""The ledger's tables and every statement on them, in plain SQL: to be read, and to be taken along.

SQLite and PostgreSQL take the same text, but for two things: a number that counts itself up has another type there, and
psycopg writes %s where sqlite3 writes ?. `labkit.databases.postgres` and its connection translate.

`effects` is the truth that a run is judged by, whoever wrote its rows. `effect_keys` beside it is what `record_once`
protects them with, and `conflicts` holds what came under a key that stands for something else. `outbox` holds the events
that a producer wrote with its order, until a relay has published them. `terminal_records` holds what a person decides on.
"""

import re

SCHEMA = """
CREATE TABLE effects (
    id         INTEGER PRIMARY KEY,
    effect_key TEXT NOT NULL,
    detail     TEXT NOT NULL
);
CREATE TABLE effect_keys (
    id          INTEGER PRIMARY KEY,
    effect_key  TEXT NOT NULL UNIQUE,
    fingerprint TEXT NOT NULL
);
CREATE TABLE conflicts (
    effect_key  TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    message_id  TEXT NOT NULL,
    PRIMARY KEY (effect_key, fingerprint)
);
CREATE TABLE inbox (
    consumer   TEXT NOT NULL,
    message_id TEXT NOT NULL,
    PRIMARY KEY (consumer, message_id)
);
CREATE TABLE statuses (
    entity TEXT PRIMARY KEY,
    status TEXT NOT NULL
);
CREATE TABLE outbox (
    id         INTEGER PRIMARY KEY,
    message_id TEXT NOT NULL UNIQUE,
    effect_key TEXT NOT NULL,
    message    TEXT NOT NULL,
    published  INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE terminal_records (
    id             INTEGER PRIMARY KEY,
    message_id     TEXT NOT NULL,
    effect_key     TEXT NOT NULL,
    route          TEXT NOT NULL,
    reason         TEXT NOT NULL,
    required_check TEXT NOT NULL,
    owner          TEXT,
    attempts       INTEGER NOT NULL,
    UNIQUE (message_id, effect_key)
);
CREATE TABLE deliveries (
    message_id TEXT NOT NULL,
    attempt    INTEGER NOT NULL,
    effect_key TEXT NOT NULL,
    worker     INTEGER NOT NULL,
    PRIMARY KEY (message_id, attempt)
);
"""

RECORD = "INSERT INTO effects (effect_key, detail) VALUES (?, ?)"
FIND = "SELECT effect_key, detail FROM effects WHERE effect_key = ? ORDER BY id LIMIT 1"
COUNT_EFFECTS = "SELECT effect_key, count(*) FROM effects GROUP BY effect_key"

CLAIM_KEY = "INSERT INTO effect_keys (effect_key, fingerprint) VALUES (?, ?) ON CONFLICT DO NOTHING"
COUNT_KEYS = "SELECT count(*) FROM effect_keys"
FIND_FINGERPRINT = "SELECT fingerprint FROM effect_keys WHERE effect_key = ?"
KEEP_CONFLICT = "INSERT INTO conflicts (effect_key, fingerprint, message_id) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
FORGET_KEYS = "DELETE FROM effect_keys WHERE id <= (SELECT id FROM effect_keys ORDER BY id DESC LIMIT 1 OFFSET ?)"

REMEMBER = "INSERT INTO inbox (consumer, message_id) VALUES (?, ?) ON CONFLICT DO NOTHING"

MEET_ENTITY = "INSERT INTO statuses (entity, status) VALUES (?, ?) ON CONFLICT DO NOTHING"
MOVE_STATUS = "UPDATE statuses SET status = ? WHERE entity = ? AND status = ?"
FIND_STATUS = "SELECT status FROM statuses WHERE entity = ?"

ADD_EVENT = "INSERT INTO outbox (message_id, effect_key, message) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
FIND_EVENT = "SELECT message FROM outbox WHERE message_id = ?"
#: changes nothing, and holds the oldest row: another relay that asks for the same waits for the end of this transaction
TAKE_TURN = "UPDATE outbox SET published = published WHERE id = (SELECT min(id) FROM outbox WHERE published = 0)"
WAITING_EVENTS = "SELECT message FROM outbox WHERE published = 0 ORDER BY id LIMIT ?"
MARK_EVENT = "UPDATE outbox SET published = 1 WHERE message_id = ?"
COUNT_WAITING = "SELECT effect_key, count(*) FROM outbox WHERE published = 0 GROUP BY effect_key"

RECORD_COLUMNS = ("message_id", "effect_key", "route", "reason", "required_check", "owner", "attempts")
WRITE_RECORD = f"INSERT INTO terminal_records ({', '.join(RECORD_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
FIND_RECORD = "SELECT 1 FROM terminal_records WHERE message_id = ? AND effect_key = ?"
ALL_RECORDS = f"SELECT {', '.join(RECORD_COLUMNS)} FROM terminal_records ORDER BY id"

LOG_DELIVERY = """
INSERT INTO deliveries (message_id, attempt, effect_key, worker)
SELECT ?, coalesce(max(attempt), 0) + 1, ?, ? FROM deliveries WHERE message_id = ?
ON CONFLICT DO NOTHING RETURNING attempt
"""

#: what opens a transaction and what ends it, however a statement of one's own writes that; going back to a savepoint is no end
BEGINS, ENDS = (re.compile(rf"\s*({words})", re.IGNORECASE) for words in
                (r"BEGIN\b|START\s+TRANSACTION\b", r"(COMMIT|END|ROLLBACK|ABORT)\b(?!\s+((WORK|TRANSACTION)\s+)?TO\b)"))
