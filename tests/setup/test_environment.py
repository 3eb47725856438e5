"""The environment is complete or known to be unfinished, whatever cut an earlier set-up off."""
import subprocess
import sys

import pytest

from labkit import paths
from labkit.setup import SetupError, environment


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkout of its own, whose requirements need no network."""
    venv = tmp_path / ".venv"
    for name, value in {"ROOT": tmp_path, "VENV": venv, "PYTHON": venv / "bin" / "python", "STAMP": venv / "labkit-stamp",
                        "REQUIREMENTS": tmp_path / "requirements.txt",
                        "SETTINGS": venv / "share" / "jupyter" / "lab" / "settings" / "overrides.json"}.items():
        monkeypatch.setattr(environment, name, value)
    monkeypatch.setattr(paths, "state", lambda: tmp_path)
    environment.REQUIREMENTS.write_text("# nothing\n")
    return tmp_path


def test_a_set_up_makes_a_complete_environment_that_finds_labkit_and_a_second_one_does_nothing(folder, capsys):
    environment.ensure()
    assert environment.ready()
    found = subprocess.run([environment.PYTHON, "-c", "import sys; print(sys.path)"], capture_output=True, text=True, cwd="/")
    assert repr(str(folder)) in found.stdout
    assert '"fetchNews": "false"' in environment.SETTINGS.read_text()
    capsys.readouterr()
    environment.ensure()
    assert capsys.readouterr().out == ""


def test_what_a_cut_off_set_up_left_is_made_anew(folder):
    environment.ensure()
    environment.STAMP.write_text(environment.UNFINISHED)
    half = environment.VENV / "half-installed"
    half.touch()
    assert not environment.ready()
    environment.ensure()
    assert environment.ready() and not half.exists()


def test_an_environment_without_a_stamp_is_somebody_elses_work_and_is_completed_not_removed(folder):
    subprocess.run([sys.executable, "-m", "venv", environment.VENV], check=True)
    theirs = environment.VENV / "theirs"
    theirs.touch()
    environment.ensure()
    assert environment.ready() and theirs.exists()


def test_other_requirements_or_another_place_make_it_incomplete(folder, monkeypatch):
    environment.VENV.joinpath("bin").mkdir(parents=True)
    environment.PYTHON.symlink_to(sys.executable)
    environment.STAMP.write_text(environment._wanted())
    assert environment.ready()
    environment.REQUIREMENTS.write_text("# something\n")
    assert not environment.ready()
    environment.STAMP.write_text(environment._wanted())
    monkeypatch.setattr(environment, "ROOT", folder / "moved")
    assert not environment.ready()


def test_an_environment_whose_python_is_gone_is_not_ready(folder):
    environment.VENV.joinpath("bin").mkdir(parents=True)
    environment.PYTHON.symlink_to(folder / "removed-python")
    environment.STAMP.write_text(environment._wanted())
    assert not environment.ready()


def test_packages_that_cannot_be_installed_leave_it_unfinished_and_are_named(folder):
    environment.REQUIREMENTS.write_text(f"{folder}/no-such-package.whl\n")
    with pytest.raises(SetupError, match="no-such-package"):
        environment.ensure()
    assert not environment.ready() and environment.STAMP.read_text() == environment.UNFINISHED


def test_a_full_disk_is_told_before_anything_is_made(folder, monkeypatch):
    monkeypatch.setattr(environment, "NEEDED_MB", 10**9)
    with pytest.raises(SetupError, match="MB left"):
        environment.ensure()
    assert not environment.VENV.exists()


def test_two_set_ups_at_once_work_one_after_the_other(folder):
    """The second one says that it waits, and finds everything done."""
    code = (f"import pathlib; from labkit import paths; from labkit.setup import environment as e\n"
            f"folder = pathlib.Path({str(folder)!r}); paths.state = lambda: folder\n"
            f"for name in 'VENV PYTHON STAMP REQUIREMENTS SETTINGS'.split():\n"
            f"    setattr(e, name, folder / getattr(e, name).relative_to(e.ROOT))\n"
            f"e.ROOT = folder; e.ensure(); print('ready', e.ready())\n")
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120)[0] for process in both]
    assert all("ready True" in text for text in told)
    assert sum("Making the Python environment …" in text for text in told) == 1
