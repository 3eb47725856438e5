"""The notebooks keep their form, their links hold, what they compare is really compared, and everything is documented."""
import ast
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import nbformat
import pytest

from labkit import OUTCOMES, STATUSES, STEPS, faults, verdict
from labkit.provider.behaviour import BEHAVIOURS
from labkit.setup import commands, notebooks
from labkit.setup.environment import ROOT
from labkit.steps import NOTES
from tests.documents import CLAIM_TAG, COMPARED, NOTEBOOKS, PAGES, cells, claims, links, prose, table

GLOSSARY = ROOT / "docs" / "glossary.md"
CHAPTERS = [path for path in NOTEBOOKS if not path.name.startswith("00")]
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
LONGEST_CELL = 12  #: lines of code: not blank, and not the mark of a compared cell


@each_notebook
def test_a_notebook_is_of_a_size_to_be_read_in_one_go(path):
    assert 20 <= len(cells(path)) + len(cells(path, "markdown")) <= 45
    for cell in cells(path):
        assert len([line for line in cell.source.splitlines() if line.strip() and line != COMPARED]) <= LONGEST_CELL, cell.source


@each_notebook
def test_cells_are_plain_python_that_installs_nothing_and_imports_names(path):
    for cell in cells(path):
        tree = ast.parse(cell.source)                 # no magics, no shell
        assert not [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names if alias.name == "*"]


@each_notebook
def test_cells_have_known_tags_only(path):
    for cell in [*cells(path), *cells(path, "markdown")]:
        for tag in cell.metadata.get("tags", ()):
            assert cell.cell_type == "code" and (tag == notebooks.VARIES or CLAIM_TAG.fullmatch(tag)), tag


@each_notebook
def test_stored_outputs_are_results_and_no_errors(path):
    for cell in cells(path):
        assert {output.output_type for output in cell.outputs} <= {"stream", "execute_result", "display_data"}
        assert {output.name for output in cell.outputs if output.output_type == "stream"} <= {"stdout"}


@each_notebook
def test_what_varies_is_not_compared_and_which_broker_it_is_varies(path):
    for cell in cells(path):
        varies, compared = notebooks.VARIES in cell.metadata.get("tags", ()), COMPARED in cell.source
        assert not (varies and compared)
        assert varies or not re.search(r"127\.0\.0\.1|RabbitMQ \d", str(cell.outputs))


@each_notebook
def test_a_notebook_compares_outputs(path):
    assert sum(cell.source.startswith(COMPARED + "\n") for cell in cells(path)) >= 2


@each_chapter
def test_a_chapter_draws_its_decision_shows_plain_pika_and_ends_with_what_to_keep(path):
    text = prose(path)
    assert text.count("```mermaid") == 1
    assert any("import pika" in cell.source for cell in cells(path))
    ending = text.split("## Three lines to keep\n")[1]
    assert re.findall(r"^(\d)\. ", ending, re.MULTILINE) == ["1", "2", "3"]
    assert "**Next:**" in ending and "https://www.rabbitmq.com/docs/" in ending


@pytest.mark.parametrize("document", [*NOTEBOOKS, *PAGES], ids=lambda path: path.name)
def test_links_lead_to_something(document):
    assert [target for target in links(document) if not (document.parent / target).exists()] == []


def test_the_first_notebook_and_the_readme_lead_to_every_chapter():
    first, readme = NOTEBOOKS[0], ROOT / "README.md"
    assert set(CHAPTERS) <= {(first.parent / target).resolve() for target in links(first)}
    assert set(NOTEBOOKS) <= {(ROOT / target).resolve() for target in links(readme)}


def test_the_glossary_tells_every_step_status_and_verdict_in_the_words_of_the_code():
    assert table(GLOSSARY, "Steps") == STEPS
    assert table(GLOSSARY, "What else a trail tells") == NOTES
    assert table(GLOSSARY, "Where an effect key ends") == STATUSES
    assert table(GLOSSARY, "How the provider behaves") == BEHAVIOURS
    assert table(GLOSSARY, "Where an order ends") == OUTCOMES
    assert set(table(GLOSSARY, "What a run proves")) == {verdict.HOLDS, verdict.BROKEN, verdict.UNKNOWN}


def test_the_glossary_tells_every_fault():
    own = {name: value for name, value in vars(faults).items()
           if getattr(value, "__module__", "") == faults.__name__ and value is not faults.Fault}
    known = {f"{name}.{method}" for name, value in own.items() if isinstance(value, type) for method in vars(value) if method[0] != "_"}
    assert set(table(GLOSSARY, "Faults")) == known | {name for name, value in own.items() if not isinstance(value, type)}


def test_every_command_is_documented():
    text = "\n".join(map(prose, [*PAGES, *NOTEBOOKS]))
    actions = [action for action in commands._parser()._actions if action.dest == "command"][0]
    for name, command in actions.choices.items():
        said = re.findall(rf"python3 -m labkit {name}\b.*", text)
        assert said, f"nothing is said about the command {name}"
        for action in command._actions:
            for word in action.choices or [option for option in action.option_strings if option not in ("-h", "--help")]:
                assert any(word in line for line in said) or f"`{word}" in text, f"nothing is said about {name} {word}"


def changed_a_little(notebook: Path, copy: Path) -> set[int]:
    """Copies a notebook with one character changed in the output of each cell that states a claim: the last digit, or the last
    letter. Returns the numbers of these cells among the code cells. Where none states a claim it changes the first compared one."""
    content = nbformat.read(notebook, as_version=4)
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    compared = [at for at, cell in enumerate(code) if COMPARED in cell.source]
    chosen = {at for at in compared if claims(code[at])} or set(compared[:1])
    for at in chosen:
        said = next(output for output in code[at].outputs if output.output_type == "stream")
        last = [*re.finditer(r"[a-z]", said.text), *re.finditer(r"\d", said.text)][-1]
        said.text = said.text[:last.start()] + ("8" if last[0] == "9" else "9") + said.text[last.end():]
    nbformat.write(content, copy)
    return chosen


@each_notebook
def test_a_stored_output_that_says_something_else_is_found(path, tmp_path):
    copy, report = tmp_path / path.name, tmp_path / "report.xml"
    chosen = changed_a_little(path, copy)
    subprocess.run([sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "--junitxml", report, copy],
                   cwd=ROOT, capture_output=True, timeout=200)
    failed = [case for case in xml.etree.ElementTree.parse(report).iter("testcase") if case.find("failure") is not None]
    assert {int(re.search(r"Cell (\d+)", case.get("name"))[1]) for case in failed} == chosen
    assert all("mismatch" in "".join(case.find("failure").itertext()) for case in failed)
