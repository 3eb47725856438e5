"""A long command shows that it is alive, tells its last lines when it fails, and never outlives an interrupted set-up."""
import signal
import subprocess
import sys

import pytest

from labkit.setup import SetupError
from labkit.setup.progress import run, span


def python(code):
    return [sys.executable, "-c", code]


def test_a_command_that_fails_is_told_with_its_last_lines_the_log_and_the_next_step(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(SetupError) as told:
        run("Cooking", python("print('no more salt'); raise SystemExit(3)"), log, now="buy salt")
    for part in ("Cooking failed (exit code 3)", "no more salt", str(log), "What now: buy salt"):
        assert part in str(told.value)


def test_a_failure_shows_nothing_of_what_an_earlier_command_left_in_the_log(tmp_path):
    log = tmp_path / "log"
    run("Before", python("print('earlier words')"), log)
    with pytest.raises(SetupError) as told:
        run("After", python("raise SystemExit('later words')"), log)
    assert "later words" in str(told.value) and "earlier words" not in str(told.value)


def test_in_a_log_progress_is_plain_lines(tmp_path, capsys):
    run("Cooking", python("pass"), tmp_path / "log")
    assert capsys.readouterr().out.splitlines() == ["Cooking …", "Cooking: done after 0 s"]


@pytest.mark.parametrize("at_its_pace, ending", [(False, -signal.SIGTERM), (True, 7)])
def test_an_interrupted_set_up_ends_its_command_but_waits_for_a_package_manager(tmp_path, at_its_pace, ending):
    """The command reports how it ended: by our SIGTERM, or after its own work, which ends when its input says so."""
    code = f"""
import signal, subprocess, sys, pathlib
from labkit.setup import progress
real = subprocess.Popen
class Child(real):
    def wait(self, timeout=None):
        if timeout is not None and not hasattr(self, "cut"):
            self.cut = True
            raise KeyboardInterrupt
        return super().wait(timeout)
    def __init__(self, *args, **options):
        global child
        child = self
        super().__init__(*args, **options)
progress.subprocess.Popen = Child
command = [sys.executable, "-c", "import time; time.sleep({0.5 if at_its_pace else 60}); raise SystemExit(7)"]
try:
    progress.run("Cooking", command, pathlib.Path({str(tmp_path / "log")!r}), at_its_pace={at_its_pace})
except KeyboardInterrupt:
    print("ended with", child.returncode)
"""
    out = subprocess.run(python(code), capture_output=True, text=True, timeout=30).stdout
    assert f"ended with {int(ending)}" in out


def test_durations_are_said_as_people_say_them():
    assert [span(0.9), span(59.9), span(125)] == ["0 s", "59 s", "2 min 05 s"]
