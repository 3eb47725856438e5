"""The status of each entity, as a handler sees it: `shop.status`. A transition is allowed only from the expected state."""

from labkit import sql, steps
from labkit.access import Access, text

FIRST = "new"                                         # the status of an entity that nobody has moved yet


class Status:
    """What state each entity is in. Raises LedgerError when the database is away, HandlerError for a name that is no text."""

    def __init__(self, access: Access):
        self._access = access

    def move(self, entity: str, expected: str, to: str) -> str:
        """Changes the status of an entity from the expected one to another, and changes nothing when it is not in it.

        Returns "moved"; or "already <to>" when it is there, which is what a repeat finds; or "refused: it is <status>".
        An entity that was never moved is "new". Outside a transaction this is one of its own.
        """
        for name, value in (("entity", entity), ("expected", expected), ("to", to)):
            text(name, value)
        with self._access.gate.step(steps.STATUS_MOVE, self._access.delivery(), entity=entity, expected=expected, to=to) as passage:
            with self._access.atomic():
                self._access.sql(sql.MEET_ENTITY, (entity, FIRST))
                if self._access.sql(sql.MOVE_STATUS, (to, entity, expected)).count:
                    passage.outcome = "moved"
                else:
                    status, = self._access.sql(sql.FIND_STATUS, (entity,)).first
                    passage.outcome = f"already {to}" if status == to else f"refused: it is {status}"
        return passage.outcome
