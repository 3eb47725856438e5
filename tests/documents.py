"""What tests read from the notebooks and the pages of documentation."""
import ast
import re
from pathlib import Path

import nbformat

from labkit.setup.environment import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMPARED = "# NBVAL_CHECK_OUTPUT"
CLAIM_TAG = re.compile(r"claim-([A-Z]\d+)")


def cells(notebook: Path, kind: str = "code"):
    """Returns the notebook's cells of this kind."""
    return [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == kind]


def prose(document: Path) -> str:
    """Returns the text of a page, or of a notebook's cells of text."""
    if document.suffix == ".md":
        return document.read_text(encoding="utf-8")
    return "\n\n".join(cell.source for cell in cells(document, "markdown"))


def claims(cell) -> list[str]:
    """Returns the ids of the claims that a cell is tagged with."""
    return [match[1] for tag in cell.metadata.get("tags", ()) if (match := CLAIM_TAG.fullmatch(tag))]


def marked(test_file: Path) -> set[str]:
    """Returns the ids of the claims that the tests of a file are marked with."""
    marks = [decorator for node in ast.walk(ast.parse(test_file.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)
             for decorator in node.decorator_list if ast.unparse(decorator).startswith("pytest.mark.claim(")]
    return {argument.value for mark in marks for argument in mark.args}


def links(document: Path) -> list[str]:
    """Returns the targets of all links and pictures that lie in this repository, without the part after #."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    return [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]


def table(page: Path, heading: str) -> dict[str, str]:
    """Returns the first table below a heading of a page as {first column: second column}, without quotes and stars."""
    below = prose(page).split(f"\n## {heading}\n", 1)[1].split("\n## ")[0]
    rows = [[column.strip() for column in line.strip("|").split("|")] for line in below.splitlines() if line.startswith("|")]
    return {first.strip("`*"): second for first, second, *_ in rows[2:]}
