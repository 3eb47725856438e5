"""The one palette by meaning: colour, symbol and word always come together, so that none of them is needed alone.

The colours keep apart for the common kinds of colour blindness, and stand out on light and on dark backgrounds.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """How a status looks: `colour` as "#rrggbb", `symbol` as a character or two for text."""

    colour: str
    symbol: str


#: status -> how it looks, everywhere
LOOKS = {
    "once": Look("#009E73", "●"),
    "duplicated": Look("#D55E00", "●●"),
    "lost": Look("#AA3377", "○"),
    "terminal": Look("#2F7FC1", "■"),
    "pending": Look("#B58900", "▶"),
    "unknown": Look("#808080", "?"),
    "repeated": Look("#56B4E9", "●+"),
    "stray": Look("#CC79A7", "◇"),
    "nothing": Look("#A0A0A0", "–"),
}

#: verdict -> the status whose colour it shares
VERDICT_LOOKS = {"holds": "once", "broken": "duplicated", "unknown": "unknown"}

#: status, the one that matters most first
WORST_FIRST = ("duplicated", "lost", "stray", "unknown", "pending", "terminal", "repeated", "once", "nothing")
