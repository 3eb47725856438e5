"""Each claim has a test and a compared cell of a notebook, and each of those has its claim."""
import re
from pathlib import Path

import pytest

from labkit.setup.environment import ROOT
from tests.documents import COMPARED, NOTEBOOKS, cells, claims, marked, prose

TABLE = ROOT / "docs" / "claims.md"
ROWS = re.findall(r"^\| ([A-Z]\d+) \| (.+) \| (.+) \| (.+) \|$", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
BY_ID = {row[0]: row for row in ROWS}
each_claim = pytest.mark.parametrize("name", BY_ID)


def linked(column: str) -> list[Path]:
    return [(TABLE.parent / target).resolve() for target in re.findall(r"\]\(([^)]+)\)", column)]


def stating(notebook: Path, name: str):
    return [cell for cell in cells(notebook) if name in claims(cell)]


def test_the_table_names_each_claim_once_and_in_order():
    names = [row[0] for row in ROWS]
    assert len(names) == len(BY_ID) >= 8
    for letter in {name[0] for name in names}:
        numbers = [int(name[1:]) for name in names if name[0] == letter]
        assert numbers == sorted(numbers), f"the rows of {letter} are not in order"


@each_claim
def test_a_claim_has_a_test_in_the_file_that_its_row_names(name):
    files = linked(BY_ID[name][3])
    assert files and all(name in marked(file) for file in files)


@each_claim
def test_a_claim_is_stated_by_compared_cells_of_the_notebooks_that_its_row_names(name):
    notebooks = linked(BY_ID[name][2])
    assert notebooks
    for notebook in notebooks:
        assert stating(notebook, name), f"no cell of {notebook.name} has the tag claim-{name}"
        assert re.search(rf"\bClaims? [^.:*]*\b{name}\b", prose(notebook)), f"the text of {notebook.name} does not name claim {name}"


@each_claim
def test_the_cells_that_state_a_claim_are_compared_and_say_something(name):
    for notebook in linked(BY_ID[name][2]):
        for cell in stating(notebook, name):
            assert cell.source.startswith(COMPARED + "\n")
            assert "".join(output.get("text", "") for output in cell.outputs).strip()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_cell_states_no_claim_that_the_table_does_not_name_for_its_notebook(notebook):
    stated = {name for cell in cells(notebook) for name in claims(cell)}
    assert stated == {name for name, row in BY_ID.items() if notebook in linked(row[2])}


def test_no_test_is_marked_with_a_claim_that_the_table_does_not_name_for_its_file():
    for file in (ROOT / "tests").rglob("test_*.py"):
        assert marked(file) == {name for name, row in BY_ID.items() if file in linked(row[3])}, file.name
