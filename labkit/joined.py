"""The hops of one business case: what several runs, one behind the other, did under one correlation id, in one table."""

from labkit import table
from labkit.errors import PlanError
from labkit.result import Run

_COLUMNS = ["hop", "effect key", "attempt", "lane", "what", "outcome"]
_LEFT_OUT = ("published", "returned")                # of which the deliveries tell


class Hops:
    """The trails of every key that carries the correlation id, run by run. `rows` holds dictionaries; shown, it is a table."""

    def __init__(self, correlation_id: str, *runs: Run):
        """runs: in the order of the hops: a producer's or a consumer's run, then that of who consumes what it published, and so on."""
        self.correlation_id, self.runs = correlation_id, runs
        if not any(self._keys(run) for run in runs):
            known = dict.fromkeys(message.correlation_id for run in runs for message in (*run.messages, *run.published))
            raise PlanError(f"No message of these runs has the correlation id {correlation_id!r}.", "a misspelt id, or no run was given",
                            "The ids are: " + ", ".join(map(table.plain, list(known)[:10])) + ".")

    @property
    def rows(self) -> list[dict[str, object]]:
        """One dictionary a line: hop (the handler or producer), effect key, attempt, lane, what, outcome."""
        return [{"hop": run.name, "effect key": key, **{name: row[name] for name in _COLUMNS[2:]}}
                for run in self.runs for key in self._keys(run) for row in run.trail(key).rows if row["what"] not in _LEFT_OUT]

    def _keys(self, run: Run) -> list[str]:
        """Returns the effect keys of this run's own messages that carry the id; of a producer's run those that it published."""
        return list(dict.fromkeys(message.effect_key for message in run.messages or run.published if message.correlation_id == self.correlation_id))

    def __repr__(self) -> str:
        return f"{table.plain(self.correlation_id)}: {table.count(len(self.runs), 'hop')}\n{table.text(*self._table())}"

    def _repr_html_(self) -> str:
        return table.markup(f"{self.correlation_id}: {table.count(len(self.runs), 'hop')}", *self._table(), header="what")

    def _table(self) -> tuple[list[str], list[list]]:
        return _COLUMNS, [[row[name] for name in _COLUMNS] for row in self.rows]


def hops(correlation_id: str, *runs: Run) -> Hops:
    """Returns what these runs did under one correlation id, as one table. Raises PlanError when none of them knows it."""
    return Hops(correlation_id, *runs)
