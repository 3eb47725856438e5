"""Notebooks are saved the canonical way, and the committed ones are."""
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.setup import notebooks

COMMITTED = sorted(notebooks.NOTEBOOKS.glob("*.ipynb"))


def write(path, *sources):
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), path)
    return path


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_notebook_is_canonical_and_was_run_from_top_to_bottom(path):
    assert notebooks.is_canonical(path), "run: python3 -m labkit notebooks run"
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.id for cell in cells] == list(dict.fromkeys(cell.id for cell in cells))


def test_running_a_notebook_twice_gives_the_same_bytes(tmp_path):
    path = write(tmp_path / "a.ipynb", "import sys\nprint('one', flush=True)\nprint('two')", "", "print('x', file=sys.stderr)\n40 + 2")
    assert notebooks.execute(path)
    first = path.read_bytes()
    assert not notebooks.execute(path)
    assert path.read_bytes() == first and notebooks.is_canonical(path)
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.execution_count for cell in cells] == [1, None, 2]
    assert cells[0].outputs[0].text == "one\ntwo\n"


def test_an_output_that_varies_is_kept_until_it_is_cleared_or_says_something_else(tmp_path):
    def cell():
        return nbformat.read(path, as_version=4).cells[0]

    def store(**changes):
        nbformat.write(new_notebook(cells=[nbformat.from_dict(cell() | changes)]), path)
        notebooks.execute(path)
        return cell().outputs
    path = write(tmp_path / "a.ipynb", "import os, time\nf'{time.perf_counter_ns():{20 + os.urandom(1)[0]}} ns'")
    first = store(metadata={"tags": [notebooks.VARIES]})
    assert not notebooks.execute(path) and cell().outputs == first
    second = store(outputs=[])
    assert second not in ([], first)
    third = store(source="import time\nf'{time.perf_counter_ns()} nanoseconds'")
    assert "nanoseconds" in third[0].data["text/plain"]
    fourth = store(metadata={})
    assert notebooks.execute(path) and cell().outputs != fourth


def test_a_cell_that_fails_is_named_and_the_file_stays_as_it_was(tmp_path, capsys):
    path = write(tmp_path / "broken.ipynb", "1", "raise ValueError('no such invoice')")
    before = path.read_bytes()
    assert notebooks.run([str(path)]) == 1
    said = capsys.readouterr().out
    assert "broken.ipynb, cell 2" in said and "no such invoice" in said
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_canonical_text_holds_nothing_that_differs_between_runs_or_machines():
    cell = new_code_cell("1", id="code", execution_count=17, metadata={"tags": ["exercise"], "execution": {"iopub.status.busy": "2026-01-01"},
                                                           "scrolled": True})
    cell.outputs = [new_output("stream", name="stdout", text="a"), new_output("stream", name="stdout", text="b"),
                    new_output("execute_result", {"text/plain": "Panel", notebooks.WIDGET: {"model_id": "c0ffee"}}, execution_count=17)]
    notebook = new_notebook(cells=[new_markdown_cell("# A", id="text"), cell],
                            metadata={"widgets": {}, "language_info": {"name": "python", "version": "3.11.7"},
                                      "kernelspec": {"name": "venv", "display_name": "mine", "language": "python"}})
    text = notebooks.canonical(notebook)
    for gone in ("c0ffee", "2026", "3.11.7", "venv", "17", "widgets", "scrolled"):
        assert gone not in text
    read = nbformat.reads(text, as_version=4)
    assert read.cells[1].metadata == {"tags": ["exercise"]}
    assert [output.get("text") for output in read.cells[1].outputs] == ["ab", None]
    assert text.endswith("}\n") and not text.endswith("\n\n")
    assert notebooks.canonical(read) == text
    nbformat.validate(read)
