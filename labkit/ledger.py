"""The ledger as a handler sees it: effects, their unique keys, the inbox, and transactions. Each method is a step."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from labkit import sql, steps
from labkit.access import Access, text


class Ledger:
    """`shop.ledger`. Each method raises LedgerError when the database is away, HandlerError for a key that is no text."""

    def __init__(self, access: Access, consumer: str, forget_after: int | None = None):
        """consumer: the name in the inbox; forget_after: how many effect keys are kept, the newest; None keeps all."""
        self._access, self._consumer, self._forget_after = access, consumer, forget_after

    def record(self, effect_key: str, **detail: Any) -> None:
        """Writes an effect. Nothing stands against a second one for the same key."""
        with self._on(effect_key, steps.LEDGER_RECORD):
            self._access.sql(sql.RECORD, (effect_key, json.dumps(detail)))

    def record_once(self, effect_key: str, **detail: Any) -> str:
        """Writes an effect and its unique key in one transaction.

        Returns "recorded"; or "duplicate" when the key is there already; or "conflict" when it is there for a message with
        another payload, which is kept apart in `conflicts` for a person. In both of these no effect is written.
        """
        with self._on(effect_key, steps.LEDGER_RECORD_ONCE) as passage, self._access.atomic():
            fingerprint = self._fingerprint()
            known = self._claim(effect_key, fingerprint)
            if known is None:
                self._access.sql(sql.RECORD, (effect_key, json.dumps(detail)))
                if self._forget_after:
                    self._access.sql(sql.FORGET_KEYS, (self._forget_after,))
                passage.outcome = "recorded"
            elif known == fingerprint:
                passage.outcome = "duplicate"
            else:
                self._access.sql(sql.KEEP_CONFLICT, (effect_key, fingerprint, self._access.delivery().message.message_id))
                passage.outcome = "conflict"
        return passage.outcome

    def find(self, effect_key: str) -> dict[str, Any] | None:
        """Returns the first effect of this key as {"effect_key": …, **detail}, or None. Read-only."""
        with self._on(effect_key, steps.LEDGER_FIND) as passage:
            row = self._access.sql(sql.FIND, (effect_key,)).first
            passage.outcome = "found" if row else "nothing"
        return row and {**json.loads(row[1]), "effect_key": row[0]}

    def remember(self, message_id: str) -> str:
        """Writes the inbox row (this consumer, message id). Returns "new", or "duplicate" when it is there already."""
        with self._step(steps.LEDGER_REMEMBER, message_id=text("message_id", message_id)) as passage:
            new = self._access.sql(sql.REMEMBER, (self._consumer, message_id)).count
            passage.outcome = "new" if new else "duplicate"
        return passage.outcome

    def execute(self, statement: str, parameters: tuple = ()) -> list[tuple]:
        """Runs one SQL statement of your own, with ? for each parameter, and returns its rows, a tuple each."""
        with self._step(steps.LEDGER_EXECUTE, statement=statement):
            return self._access.sql(statement, parameters).rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Makes what is written inside durable together, at its end, or not at all when the body raises."""
        access, delivery = self._access, self._access.delivery()
        with access.gate.step(steps.LEDGER_BEGIN, delivery):
            access.begin()
        try:
            yield
            with access.gate.step(steps.LEDGER_COMMIT, delivery):
                access.sql("COMMIT")
        except BaseException:
            if access.in_transaction:                 # else the body ended it by a statement of its own
                with access.gate.step(steps.LEDGER_ROLLBACK, delivery):
                    access.sql("ROLLBACK")
            raise
        finally:
            access.leave()

    def log_delivery(self, message_id: str, effect_key: str, worker: int) -> int:
        """Writes one row to the delivery log, before any work, and returns which handing-over this is, 1 the first."""
        self._access.check()
        while True:
            row = self._access.sql(sql.LOG_DELIVERY, (message_id, effect_key, worker, message_id)).first
            if row:                                   # else another worker has written this number meanwhile
                return row[0]

    def _step(self, name: str, **detail: Any) -> steps.Passage:
        return self._access.gate.step(name, self._access.delivery(), **detail)

    def _on(self, effect_key: str, name: str) -> steps.Passage:
        delivery = self._access.delivery()
        is_its_own = text("effect_key", effect_key) == (delivery and delivery.message.effect_key)
        return self._step(name) if is_its_own else self._step(name, effect_key=effect_key)

    def _claim(self, effect_key: str, fingerprint: str) -> str | None:
        """Writes the key and returns None; or returns the fingerprint that it is there with already."""
        while True:
            if self._access.sql(sql.CLAIM_KEY, (effect_key, fingerprint)).count:
                return None
            if known := self._access.sql(sql.FIND_FINGERPRINT, (effect_key,)).first:
                return known[0]                       # else another worker has forgotten the key meanwhile

    def _fingerprint(self) -> str:
        """Returns what the message asks for in a few letters: the same for the same payload."""
        delivery = self._access.delivery()
        payload = json.dumps(delivery.message.payload if delivery else {}, sort_keys=True)
        return hashlib.sha256(payload.encode()).hexdigest()[:16]


def count_effects(place: Any) -> dict[str, int]:
    """Returns the number of effect rows for each effect key, once no dead worker can add one. Raises LedgerError."""
    return _counted(place.settled(sql.COUNT_EFFECTS))


def count_effects_so_far(place: Any) -> dict[str, int]:
    """Returns the same as it stands while workers write."""
    return _counted(place.query(sql.COUNT_EFFECTS))


def _counted(rows: list[tuple]) -> dict[str, int]:
    # by a statement of one's own, SQLite keeps under any key
    return {key if isinstance(key, str) else repr(key): count for key, count in rows}
