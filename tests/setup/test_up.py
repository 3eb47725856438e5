"""`up` gives JupyterLab an address that only its owner can use, and leaves nothing running, however it ends."""
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import psutil
import pytest

from labkit.setup.environment import ROOT

#: `up` with a stand-in for the node, whose own tests are in tests/broker
UP = """
import sys
from contextlib import contextmanager
from labkit import broker
from labkit.broker import Address, Broker, Secret
from labkit.setup import commands
@contextmanager
def lease():
    yield Broker(Address("127.0.0.1", 5672, "lab", Secret("lab")), "url", "a stand-in")
broker.lease = lease
commands._set_up = lambda *_: None
sys.exit(commands.main(["up", "--no-browser", *sys.argv[1:]]))
"""


class Up:
    """A started `up`: its address, and every process that it started, a kernel included."""

    def __init__(self, state, arguments=(), terminal=False):
        self.state = state
        environ = {**os.environ, "LABKIT_STATE": str(state)}
        self.master = None
        if terminal:
            self.master, slave = pty.openpty()
            login = "import fcntl, os, sys, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
            self.process = subprocess.Popen([sys.executable, "-c", login, sys.executable, "-c", UP, *arguments], cwd=ROOT, env=environ,
                                            stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
            os.close(slave)
            output = os.fdopen(os.dup(self.master), errors="replace")
        else:
            self.process = subprocess.Popen([sys.executable, "-c", UP, *arguments], cwd=ROOT, env=environ, text=True,
                                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
            output = self.process.stdout
        self.said = []
        for line in iter(output.readline, ""):
            self.said.append(line.rstrip())
            if line.startswith("http"):
                break
        self.address = self.said[-1]
        if terminal:
            output.close()

    def ask(self, path, token=True, body=None):
        headers = {"Authorization": f"token {self.address.split('token=')[1]}"} if token else {}
        request = urllib.request.Request(f"{self.address.split('/lab')[0]}{path}", headers=headers, data=body)
        return urllib.request.urlopen(request, timeout=20).read()

    def with_kernel(self):
        self.ask("/api/kernels", body=b"{}")
        self.family = family(self.state)
        assert any("ipykernel" in " ".join(process.cmdline()) for process in self.family)
        return self

    def all_gone(self):
        _, alive = psutil.wait_procs(self.family, timeout=20)
        return not alive


def family(state):
    """The processes that work on this state folder, as their environment says."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LABKIT_STATE") == str(state):
                found.append(process)
        except psutil.Error:
            pass
    return found


@contextmanager
def up(state, *arguments, **options):
    started = Up(state, arguments, **options)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.terminate()
            started.process.wait(timeout=60)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)])
def test_nothing_outlives_it_whatever_signal_ends_it(tmp_path, number, code):
    with up(tmp_path) as started:
        started.with_kernel().process.send_signal(number)
        assert started.process.wait(timeout=60) == code
        assert started.all_gone()


def test_a_terminal_that_is_closed_ends_everything(tmp_path):
    with up(tmp_path, terminal=True) as started:
        started.with_kernel()
        os.close(started.master)
        started.process.wait(timeout=60)
        assert started.all_gone()


def test_only_loopback_reaches_it_and_only_with_the_token(tmp_path):
    with up(tmp_path) as started:
        port = int(started.address.split(":")[2].split("/")[0])
        listening = {tuple(connection.laddr) for process in psutil.Process(started.process.pid).children()
                     for connection in process.net_connections("tcp") if connection.status == psutil.CONN_LISTEN}
        assert listening == {("127.0.0.1", port)}
        assert json.loads(started.ask("/api/kernels")) == []
        with pytest.raises(urllib.error.HTTPError, match="403"):
            started.ask("/api/kernels", token=False)
        assert started.ask("/lab")


def test_jupyterlab_neither_asks_for_news_nor_looks_for_updates(tmp_path):
    with up(tmp_path) as started:
        schema = json.loads(started.ask("/lab/api/settings/@jupyterlab/apputils-extension:notification"))["schema"]
        assert {name: schema["properties"][name]["default"] for name in ("fetchNews", "checkForUpdates")} == {
            "fetchNews": "false", "checkForUpdates": False}


def test_the_token_is_the_same_at_the_next_start_is_in_no_log_and_is_readable_by_its_owner_only(tmp_path):
    tokens = []
    for _ in range(2):
        with up(tmp_path) as started:
            tokens.append(started.address.split("token=")[1])
    assert tokens[0] == tokens[1]
    assert tokens[0] not in tmp_path.joinpath("jupyter.log").read_text()
    assert {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}["jupyter.token"] == 0o600


def test_a_taken_port_is_passed_over_unless_it_was_asked_for(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with up(tmp_path, "--port", str(port)) as started:
            assert started.process.wait(timeout=20) == 1
            assert f"Port {port} is taken" in "\n".join(started.said)
    with up(tmp_path) as first, up(tmp_path) as second:
        assert first.address.split("/lab")[0] != second.address.split("/lab")[0]


def test_a_node_that_cannot_start_ends_jupyterlab_too_and_is_told(tmp_path):
    failing = UP.replace("    yield", '    from labkit.errors import BrokerError\n    raise BrokerError("No RabbitMQ.")\n    yield')
    done = subprocess.run([sys.executable, "-c", failing], cwd=ROOT, env={**os.environ, "LABKIT_STATE": str(tmp_path)},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "No RabbitMQ." in done.stderr and "http" not in done.stdout
    assert family(tmp_path) == []


def test_jupyterlab_that_cannot_start_is_told_with_its_last_lines(tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    broken.joinpath("jupyterlab.py").write_text("raise SystemExit('this JupyterLab is broken')")
    done = subprocess.run([sys.executable, "-c", UP], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "LABKIT_STATE": str(tmp_path), "PYTHONPATH": f"{broken}:{ROOT}"})
    assert done.returncode == 1
    assert "JupyterLab did not start" in done.stderr and "this JupyterLab is broken" in done.stderr
