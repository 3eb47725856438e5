"""The report: a run or a sweep in words, as text and as HTML. The same run gives the same words: no times, no ids."""

from labkit import table
from labkit.palette import LOOKS, VERDICT_LOOKS, WORST_FIRST
from labkit.race import Race
from labkit.result import Run
from labkit.sweep import Sweep
from labkit.table import count
from labkit.trail import Trail  # noqa: F401  (shown like the rest, and found here)

_MOST_ROWS = 12
_MOST_LINES, _MOST_CHARACTERS = 10, 600


def run_text(run: Run) -> str:
    """Returns the verdict with its reason, the totals, a row a key, and what was planned, raised and printed."""
    shown, left_out = _rows(run)
    parts = [f"{run.verdict}: {run.why}", run.total, "", table.text(run.columns, shown), *[left_out] * bool(left_out)]
    notes = _notes(run)
    if notes:
        parts += ["", *[f"{name}: {value}" for name, value in notes]]
    printed, cut = _printed(run)
    if printed:
        parts += ["", f"{cut}:", *[f"    {line}" for line in printed]]
    return "\n".join(parts)


def run_html(run: Run) -> str:
    """Returns what `run_text` says, as HTML."""
    shown, left_out = _rows(run)
    parts = [_headline(run.verdict, run.why), table.markup(run.total, run.columns, shown, header=run.columns[0])]
    parts += [f'<div style="opacity: .8">{table.escape(left_out)}</div>'] * bool(left_out)
    parts += [f"<div>{name}: {table.escape(value)}</div>" for name, value in _notes(run)]
    printed, cut = _printed(run)
    if printed:
        text = table.escape("\n".join(printed))
        parts.append(f'<div>{cut}:</div><pre style="margin: .2em 0 0 1em">{text}</pre>')
    return _framed(parts)


def sweep_text(sweep: Sweep) -> str:
    """Returns the verdict with its reason, and a row a crash point."""
    return "\n".join([f"{sweep.verdict}: {sweep.why}", _sweep_caption(sweep), "", table.text(_sweep_columns(sweep), _sweep_rows(sweep))])


def sweep_html(sweep: Sweep) -> str:
    """Returns what `sweep_text` says, as HTML."""
    columns = _sweep_columns(sweep)
    return _framed([_headline(sweep.verdict, sweep.why),
                    table.markup(_sweep_caption(sweep), columns, _sweep_rows(sweep), header=columns[0])])


def race_text(race: Race) -> str:
    """Returns the verdict with its reason, and a row a status: how many schedules end with it, and the first of them."""
    return "\n".join([f"{race.verdict}: {race.why}", _race_caption(race), "", table.text(_RACE_COLUMNS, _race_rows(race))])


def race_html(race: Race) -> str:
    """Returns what `race_text` says, as HTML."""
    return _framed([_headline(race.verdict, race.why), table.markup(_race_caption(race), _RACE_COLUMNS, _race_rows(race), header=_RACE_COLUMNS[0])])


def experiment_text(experiment: "Survival | Expiry") -> str:
    """Returns the verdict with its reason, and a row a queue, or a kind of queue."""
    return "\n".join([f"{experiment.verdict}: {experiment.why}", experiment.CAPTION, "", table.text(experiment.COLUMNS, experiment.cells)])


def experiment_html(experiment: "Survival | Expiry") -> str:
    """Returns what `experiment_text` says, as HTML."""
    return _framed([_headline(experiment.verdict, experiment.why),
                    table.markup(experiment.CAPTION, experiment.COLUMNS, experiment.cells, header=experiment.COLUMNS[0])])


_RACE_COLUMNS = ("status", "schedules", "the first of them")


def _rows(run: Run) -> tuple[list[list], str]:
    """Returns the rows to show, and what is said about the rest. Keys that are not once come first where not all are shown."""
    keys = list(run.statuses)
    if len(keys) > _MOST_ROWS:
        keys.sort(key=lambda key: run.statuses[key] == "once")
    rows = [run.row(key) for key in keys[:_MOST_ROWS]]
    rest = [run.statuses[key] for key in keys[_MOST_ROWS:]]
    said = ", ".join(f"{rest.count(name):,} {name}" for name in LOOKS if name in rest)
    return rows, f"… and {count(len(rest), 'more key')}: {said}" if rest else ""


def _notes(run: Run) -> list[tuple[str, str]]:
    facts = run.facts
    notes = [("planned", f"{plan}, " + {0: "did not fire", 1: "fired"}.get(fired, f"fired {fired} times"))
             for plan, fired in zip(facts.planned, facts.fired)]
    notes += [("error", table.plain(error, 300)) for error in facts.errors]
    if facts.ending != "over":
        notes.append(("ending", facts.ending + (f": {facts.reason}" if facts.reason and facts.reason != run.why else "")))
    return notes


def _printed(run: Run) -> tuple[list[str], str]:
    """Returns the lines to show of what handlers printed, and the words above them, which tell how much it was."""
    text = run.facts.printed
    lines = text[:_MOST_CHARACTERS].splitlines()[:_MOST_LINES]
    shown = [table.plain(line, _MOST_CHARACTERS) for line in lines]
    whole = run.facts.printed_bytes <= len(text.encode()) and len("\n".join(lines)) >= len(text.rstrip("\n"))
    return shown, "printed" if whole else f"printed ({run.facts.printed_bytes:,} bytes, of which this is the beginning)"


def _sweep_rows(sweep: Sweep) -> list[list]:
    return [[row.point, *row.numbers, *[row.charges] * sweep.charged, row.status, row.verdict] for row in sweep.rows]


def _sweep_columns(sweep: Sweep) -> tuple[str, ...]:
    return ("crash point", *sweep.rows[0].run.SWEPT, *["charges"] * sweep.charged, "status", "verdict")


def _sweep_caption(sweep: Sweep) -> str:
    return f"{sweep.name} · {count(len(sweep.rows) - 1, 'crash point')}"


def _race_rows(race: Race) -> list[list]:
    first = {status: next((schedule.told for schedule in race.schedules if schedule.status == status), None) for status in WORST_FIRST}
    return [[status, race.counts[status], " · ".join(told)] for status, told in first.items() if told is not None]


def _race_caption(race: Race) -> str:
    return f"{race.name} · {race.tried} of {race.total or 'more'} schedules"


def _headline(verdict: str, why: str) -> str:
    look = LOOKS[VERDICT_LOOKS[verdict]]
    return f'<div style="border-left: .3em solid {look.colour}; padding-left: .6em"><strong>{verdict}</strong>: {table.escape(why)}</div>'


def _framed(parts: list[str]) -> str:
    return '<div style="color: var(--jp-content-font-color1, inherit)">\n' + "\n".join(parts) + "\n</div>"
