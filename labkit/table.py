"""Tables for people: the same rows as plain text and as HTML for JupyterLab, nbviewer and GitHub."""

import html
from collections.abc import Iterable, Sequence

from labkit.palette import LOOKS

_PLURALS = {"delivery": "deliveries", "retry": "retries", "dead-lettered": "dead-lettered"}


def plain(value: object, limit: int = 60) -> str:
    """Returns one line of text: control characters escaped, and what is longer than `limit` cut in its middle."""
    line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(value))
    if len(line) <= limit:
        return line
    tail = limit // 3
    return line[:limit - tail - 1] + "…" + line[-tail:]


def count(number: int | None, noun: str) -> str:
    """Returns the number with its noun, such as "1 delivery"; a number that is not known is told so."""
    plural = _PLURALS.get(noun, f"{noun}s")
    return f"an unknown number of {plural}" if number is None else f"{number:,} {noun if number == 1 else plural}"


def text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns the table as lines of text: numbers to the right, words to the left."""
    rows = [list(row) for row in rows]
    cells = [list(columns), *[[_shown(value) for value in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    right = [_is_numeric(column) for column in zip(*rows)] or [False] * len(columns)
    return "\n".join("  ".join(cell.rjust(width) if to_right else cell.ljust(width)
                               for cell, width, to_right in zip(line, widths, right)).rstrip() for line in cells)


def markup(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], header: str) -> str:
    """Returns the table as HTML; cells of the column `header` head their rows, and a status gets its symbol."""
    rows = [list(row) for row in rows]
    right = [_is_numeric(column) for column in zip(*rows)] or [False] * len(columns)
    sides = ["right" if to_right else "left" for to_right in right]
    head = "".join(f'<th scope="col" style="text-align: {side}">{escape(name)}</th>' for name, side in zip(columns, sides))
    body = "\n".join("<tr>" + "".join(_cell(name, value, side, name == header) for name, value, side in zip(columns, row, sides)) + "</tr>"
                     for row in rows)
    return (f'<table><caption style="caption-side: top; text-align: left; color: inherit">{escape(caption)}</caption>\n'
            f'<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>')


def escape(value: object) -> str:
    """Returns the text for HTML, quotes included."""
    return html.escape(str(value))


def status(name: str) -> str:
    """Returns a status as HTML: its symbol in its colour, and its word."""
    look = LOOKS[name]
    return f'<span aria-hidden="true" style="color: {look.colour}">{look.symbol}</span> {name}'


def _cell(name: str, value: object, side: str, heads: bool) -> str:
    shown = status(value) if name == "status" else escape(_shown(value))
    return f'<th scope="row" style="text-align: {side}; font-weight: normal">{shown}</th>' if heads else f'<td style="text-align: {side}">{shown}</td>'


def _shown(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else plain(value)


def _is_numeric(column: Sequence[object]) -> bool:
    return any(isinstance(value, int) for value in column)
