"""Execute notebooks and save them the canonical way: the same notebook gives the same bytes. Needs the environment.

Canonical means: outputs of a run from top to bottom, counted 1..n; nothing that differs from one run or machine to the
next (times, widget ids, the Python's version, how a stream was cut in pieces); keys sorted, one newline at the end.
A cell whose output must differ, such as a picture with times, carries the tag `varies`: its stored output is kept as long
as a new one says the same but for its numbers. To renew it, clear it first.
"""
import json
import os
import re
from pathlib import Path

import nbformat

from labkit.setup import SetupError
from labkit.setup.environment import ROOT
from labkit.setup.progress import say

NOTEBOOKS = ROOT / "notebooks"
CELL_TIMEOUT_S = 120
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
WIDGET = "application/vnd.jupyter.widget-view+json"
CELL_METADATA = ("tags",)  #: all else is a trace of the editor or of the run
VARIES = "varies"  #: tag of a cell whose output differs from run to run
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def run(names: list[str]) -> int:
    """Execute the notebooks named, or all of them, and save their outputs. Returns 1 if one failed, else 0.

    One that fails is left as it was, and its cell and error are told.
    """
    failed = 0
    for path in [Path(name).resolve() for name in names] or sorted(NOTEBOOKS.glob("*.ipynb")):
        try:
            changed = execute(path)
            say(f"{path.name}: {'saved' if changed else 'unchanged'}")
        except SetupError as error:
            failed += 1
            say(str(error))
    return 1 if failed else 0


def execute(path: Path) -> bool:
    """Execute one notebook in its folder and save it; says whether its text changed.

    Raises SetupError that names the notebook and the cell when a cell fails; the file is then as it was.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    before = path.read_text(encoding="utf-8")
    notebook = nbformat.reads(before, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", record_timing=False, extra_arguments=["--log-level=ERROR"],
                            resources={"metadata": {"path": str(path.parent)}})
    cell = {"index": None}
    client.on_cell_execute = lambda cell_index, **_: cell.update(index=cell_index)
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise SetupError(f"{path.name}, cell {cell['index'] + 1}: {_last_line(error)}",
                         "the notebook was left as it was", f"open it and run it up to cell {cell['index'] + 1}") from error
    _keep_what_varies(nbformat.reads(before, as_version=4), notebook)
    after = canonical(notebook)
    if changed := after != before:
        beside = path.with_suffix(".ipynb.new")
        beside.write_text(after, encoding="utf-8")
        os.replace(beside, path)
    return changed


def canonical(notebook: nbformat.NotebookNode) -> str:
    """The text of `notebook` as it is committed. Applied to its own result it changes nothing."""
    notebook = nbformat.from_dict(json.loads(json.dumps(notebook)))
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    count = 0
    for position, cell in enumerate(notebook.cells):
        cell.setdefault("id", f"cell-{position + 1}")
        cell.metadata = {key: cell.metadata[key] for key in CELL_METADATA if key in cell.metadata}
        if cell.cell_type == "code":
            count += bool(cell.source.strip())
            cell.execution_count = count if cell.source.strip() else None
            cell.outputs = _outputs(cell.outputs, cell.execution_count)
    return nbformat.writes(notebook, version=4).rstrip("\n") + "\n"


def is_canonical(path: Path) -> bool:
    """Say whether the file holds its notebook as `run` would save it, given its outputs. Read-only."""
    text = path.read_text(encoding="utf-8")
    return text == canonical(nbformat.reads(text, as_version=4))


def _keep_what_varies(before: nbformat.NotebookNode, after: nbformat.NotebookNode) -> None:
    for old, new in zip(before.cells, after.cells):
        if VARIES in new.metadata.get("tags", ()) and _words(old) == _words(new):
            new.outputs = old.outputs


def _words(cell: nbformat.NotebookNode) -> str:
    """What the outputs of a code cell say, without digits, and without the spaces that make room for them."""
    said = "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
    return re.sub(r"[\d ]+", " ", said)


def _outputs(outputs: list, count: int | None) -> list:
    """The outputs without what differs from run to run, and neighbours of one stream joined."""
    kept = []
    for output in outputs:
        if output.output_type == "stream" and kept and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
            continue
        if "execution_count" in output:
            output.execution_count = count
        if WIDGET in output.get("data", {}):
            del output.data[WIDGET]
        kept.append(output)
    return kept


def _last_line(error: Exception) -> str:
    lines = [line for line in COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
