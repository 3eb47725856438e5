"""The picture: a matplotlib figure that shows itself once, with a text that says the same to those who cannot see it."""

import base64
import contextlib
import functools
import io
import pathlib
import textwrap
import warnings

import matplotlib
import matplotlib.style
import PIL.Image
from matplotlib.figure import Figure

from labkit.table import escape

INK, MUTED, LINE, BUSY, DELIVERIES = "#22262B", "#5F6874", "#C9CDD3", "#B9CBE0", "#8A9BB0"
_STYLE = pathlib.Path(__file__).parent.parent / "labkit.mplstyle"
_DPI = 144


class Picture:
    """One figure. `figure` is matplotlib's; `repr` is its text alternative."""

    def __init__(self, figure: Figure, alternative: str):
        self.figure, self.alternative = figure, alternative

    @functools.cached_property
    def png(self) -> bytes:
        """The image as PNG; the same figure gives the same bytes."""
        buffer = io.BytesIO()
        with styled(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")         # a learner's key may be in any script
            self.figure.savefig(buffer, format="png", dpi=_DPI)
        with PIL.Image.open(buffer) as image, io.BytesIO() as small:
            image.convert("RGB").quantize(256, PIL.Image.Quantize.MAXCOVERAGE, dither=PIL.Image.Dither.NONE).save(small, "png", optimize=True)
            return small.getvalue()

    def __repr__(self) -> str:
        return self.alternative

    def _repr_html_(self) -> str:
        width = round(self.figure.get_figwidth() * 96)
        return (f'<img alt="{escape(self.alternative)}" width="{width}" style="max-width: 100%; height: auto" '
                f'src="data:image/png;base64,{base64.b64encode(self.png).decode()}">')


@contextlib.contextmanager
def styled():
    """Draws in labkit's style, whatever the notebook has set, and leaves the notebook's settings as they were."""
    with matplotlib.style.context(_STYLE, after_reset=True):
        yield


def sheet(width: float, height: float, ax=None):
    """Returns axes whose units are inches from the lower left corner: of a new figure, or the given ones without their frame."""
    if ax is None:
        ax = Figure(figsize=(width, height)).add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    return ax


def chart(width: float, height: float, rows: int = 1, columns: int = 1, **arguments):
    """Returns `rows` charts below each other, and so `columns` of them beside each other, on a new figure with a margin around them."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.16, h_pad=0.14, hspace=0)
    return figure.subplots(rows, columns, **arguments)


def head(title: str, width: float) -> list[str]:
    """Returns the title as lines that fit `width` inches."""
    return textwrap.wrap(title, max(20, int(width / 0.092))) or [""]


def finish(ax, given, alternative: str):
    """Returns the axes that were given, or else the new picture."""
    return given if given is not None else Picture(ax.figure, alternative)
