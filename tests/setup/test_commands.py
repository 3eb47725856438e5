"""The command line: what goes where, and which exit code comes back."""
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from labkit.errors import LabError
from labkit.setup import clean, commands, doctor, suite
from labkit.setup.environment import ROOT

NAMES = ("up", "test", "doctor", "broker", "notebooks", "clean")


def labkit(*arguments, **environ):
    return subprocess.run([sys.executable, "-m", "labkit", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=120, env={**os.environ, **environ}, stdin=subprocess.DEVNULL)


def test_help_names_every_command():
    said = labkit("--help").stdout
    assert all(name in said for name in NAMES)


def test_an_older_python_is_told_which_one_is_needed_before_anything_else_is_read():
    code = "import sys, runpy; sys.version_info = (3, 10, 1); sys.modules['labkit.setup'] = None; runpy.run_module('labkit', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "needs Python 3.11 or newer, and this is Python 3.10" in done.stderr


def test_windows_is_told_its_ways(monkeypatch, capsys):
    monkeypatch.setattr(commands, "os", SimpleNamespace(name="nt"))
    assert commands.main(["up"]) == 1
    told = capsys.readouterr().err
    assert "WSL 2" in told and "docker compose up" in told


def test_an_error_is_told_without_a_traceback_and_ends_with_1(monkeypatch, capsys):
    def fail(*_):
        raise LabError("It broke.", "a test", "look here")
    monkeypatch.setattr(commands, "_up", fail)
    assert commands.main(["up"]) == 1
    assert capsys.readouterr().err == "It broke.\nLikely cause: a test\nWhat now: look here\n"


def test_ctrl_c_ends_with_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(commands, "_up", interrupted)
    assert commands.main(["up"]) == 130


def test_only_test_takes_arguments_that_are_not_its_own(monkeypatch, capsys):
    got = []
    monkeypatch.setattr(commands, "_set_up", lambda *_, **__: None)
    monkeypatch.setattr(suite, "test", lambda rest: got.append(rest) or 0)
    assert commands.main(["test", "--yes", "-k", "a or b", "-x", "tests/setup", "--maxfail=2"]) == 0
    assert got == [["-k", "a or b", "-x", "tests/setup", "--maxfail=2"]]
    with pytest.raises(SystemExit):
        commands.main(["up", "--no-such-option"])


@pytest.mark.parametrize("arguments, code", [(["--collect-only", "-q", "tests/setup/test_progress.py"], 0),
                                             (["-q", "tests/no-such-file.py"], 4), (["-q", "-k", "no_such_test", "tests/setup"], 5)])
def test_the_exit_code_of_test_is_pytests(arguments, code):
    assert labkit("test", "--yes", *arguments, LABKIT_REQUIRE_VERSIONS="").returncode == code


@pytest.mark.parametrize("named, needed", [(None, True), ("", True), ("/a", False), ("/a:/b", False), (":/a", True)])
def test_a_broker_is_set_up_for_the_suite_unless_all_its_servers_are_named(monkeypatch, named, needed):
    monkeypatch.delenv("LABKIT_RABBITMQ_SERVERS", raising=False)
    if named is not None:
        monkeypatch.setenv("LABKIT_RABBITMQ_SERVERS", named)
    assert suite.needs_a_broker() is needed


def test_doctor_is_content_where_all_is_well_and_else_tells_what_mends_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "checks", lambda: [doctor.Check("RabbitMQ", True, "3.10.8", "")])
    monkeypatch.setattr(doctor.environment, "ready", lambda: True)
    assert doctor.doctor() == 0
    assert "All is well." in capsys.readouterr().out
    monkeypatch.setattr(doctor, "checks", lambda: [doctor.Check("RabbitMQ", False, "none", "sudo apt-get install rabbitmq-server")])
    assert doctor.doctor() == 1
    said = capsys.readouterr().out
    assert "WRONG  RabbitMQ" in said and "mend: sudo apt-get install rabbitmq-server" in said


def test_doctor_finds_a_missing_environment_and_a_missing_package(monkeypatch, tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# a comment\nno-such-package~=1.0\npytest~=9.0\n")
    monkeypatch.setattr(doctor.environment, "REQUIREMENTS", requirements)
    monkeypatch.setattr(doctor.environment, "inside", lambda: True)
    missing, here = doctor._packages()
    assert (missing.name, missing.ok, here.name, here.ok) == ("no-such-package", False, "pytest", True)
    monkeypatch.setattr(doctor.environment, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(doctor.environment, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    assert not doctor._environment().ok and doctor._environment().remedy == "python3 -m labkit up"


def test_doctor_finds_a_full_disk(monkeypatch):
    monkeypatch.setattr(doctor, "NEEDED_MB", 10**9)
    assert not doctor._disk().ok


def test_clean_removes_nothing_without_a_yes_and_with_one_all_that_is_ours(monkeypatch, tmp_path):
    state = tmp_path / "state"
    state.joinpath("runs", "one").mkdir(parents=True)
    state.joinpath("jupyter.log").touch()
    state.joinpath("somebody's thesis").touch()
    stopped = []
    monkeypatch.setattr(clean.paths, "state", lambda: state)
    monkeypatch.setattr(clean.commands, "main", lambda argv: stopped.append(argv) or 0)
    monkeypatch.setattr(clean.sys, "stdin", None)
    with pytest.raises(LabError, match="add --yes"):
        clean.clean()
    monkeypatch.setattr(clean.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda _: "")
    assert clean.clean() == 0
    assert state.joinpath("runs").exists() and not stopped
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert clean.clean() == 0
    assert [path.name for path in state.iterdir()] == ["somebody's thesis"] and stopped == [["stop"]]


def test_the_command_line_starts_without_a_package_that_is_not_pythons_own():
    """So that it runs on a bare Python: none of what requirements.txt brings may be imported."""
    code = ("import sys; sys.modules.update(dict.fromkeys(['pika', 'jupyterlab', 'jupyter_core', 'nbformat', 'nbclient', 'matplotlib',"
            " 'ipywidgets', 'cloudpickle', 'psutil'])); import labkit.setup.commands, labkit.setup.packages, labkit.setup.environment,"
            " labkit.setup.doctor, labkit.setup.clean, labkit.setup.up, labkit.setup.suite")
    assert subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT).returncode == 0


def test_the_readme_tells_every_command():
    readme = ROOT.joinpath("README.md").read_text()
    assert [name for name in NAMES if f"python3 -m labkit {name}" not in readme] == []
