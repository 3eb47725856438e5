"""`up`: the private node and JupyterLab side by side, until Ctrl-C. Runs in the environment's Python."""
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from labkit import broker, paths
from labkit.broker import node
from labkit.setup import SetupError
from labkit.setup.environment import ROOT
from labkit.setup.progress import say

FIRST_NOTEBOOK = "notebooks/00_start_here.ipynb"
DEFAULT_PORT = 8888
PATIENCE_S = 60  #: for JupyterLab to answer

_no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def up(port: int | None = None, browser: bool = True) -> int:
    """Start both, print JupyterLab's address on a line of its own, and wait until JupyterLab ends or we are interrupted.

    port: JupyterLab's; None takes the first free one from 8888. Returns JupyterLab's exit code.
    Raises SetupError, or BrokerError, when either cannot be started; then neither is left running.
    """
    if port and not free(port):
        raise SetupError(f"Port {port} is taken.", "another program listens there", "leave out --port, or name another one")
    log = paths.state() / "jupyter.log"
    say("Starting RabbitMQ and JupyterLab …")
    jupyter = _start(port, browser, log)
    try:
        with broker.lease() as lease:
            address = _address(jupyter, log)
            with_it = ", and RabbitMQ with it" if lease.origin == "private" else ""
            say(f"{lease}\nJupyterLab is ready at the address in the next line. Ctrl-C ends it{with_it}.\n{address}")
            try:
                return jupyter.wait()
            finally:
                _end(jupyter)  # before the lease: its kernels use the node
    except KeyboardInterrupt:
        say("\nEnding …")
        return 0
    finally:
        _end(jupyter)
        _end_nodes_that_nobody_holds()


def _start(port: int | None, browser: bool, log: Path) -> subprocess.Popen:
    arguments = ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port or DEFAULT_PORT}",
                 f"--ServerApp.port_retries={0 if port else 50}", f"--ServerApp.root_dir={ROOT}",
                 f"--LabApp.default_url=/{_page()}", f"--ServerApp.open_browser={browser}"]
    if os.geteuid() == 0:
        arguments.append("--allow-root")
    environ = {**os.environ, "JUPYTER_PREFER_ENV_PATH": "1", "JUPYTER_TOKEN_FILE": str(_token_file())}
    with open(log, "wb") as output:  # a session of its own: Ctrl-C is for us, who then end it in order
        return subprocess.Popen([sys.executable, "-m", "labkit.setup.jupyter", *arguments], cwd=ROOT, env=environ,
                                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def _end(jupyter: subprocess.Popen) -> None:
    """Let go of the pipe that JupyterLab watches, and wait until it has ended its kernels and itself."""
    jupyter.stdin.close()
    try:
        jupyter.wait(timeout=PATIENCE_S / 3)
    except subprocess.TimeoutExpired:
        jupyter.kill()
        jupyter.wait()


def _end_nodes_that_nobody_holds() -> None:
    """Without the wait in which a node outlives its last holder: that is for kernels that restart, and ours have ended."""
    for record in node.running():
        if not any(record["home"].joinpath("leases").iterdir()):
            node.stop(record)


def _token_file() -> Path:
    """The token, kept from one start to the next, so that a page left open in the browser goes on to work."""
    file = paths.state() / "jupyter.token"
    if not file.exists():
        with open(file, "w", opener=_private) as out:
            out.write(secrets.token_hex(24))
    return file


def _page() -> str:
    return f"lab/tree/{FIRST_NOTEBOOK}" if (ROOT / FIRST_NOTEBOOK).exists() else "lab"


def _address(jupyter: subprocess.Popen, log: Path) -> str:
    """Wait until JupyterLab answers at the address that it has said in its runtime folder: it says it before it listens."""
    from jupyter_core.paths import jupyter_runtime_dir
    told = Path(jupyter_runtime_dir(), f"jpserver-{jupyter.pid}.json")
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            server = json.loads(told.read_text())
            asked = urllib.request.Request(f"{server['url']}api/status", headers={"Authorization": f"token {server['token']}"})
            _no_proxy.open(asked, timeout=PATIENCE_S).close()
            return f"{server['url']}{_page()}?token={server['token']}"
        except (OSError, ValueError):  # not written yet, or not to its end; nobody there yet, or somebody else
            pass
        try:
            jupyter.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue
        break
    lines = log.read_text(errors="replace").splitlines()[-12:]
    raise SetupError("JupyterLab did not start. Its last lines:\n" + "\n".join(f"    {line}" for line in lines),
                     f"the lines above name it; all of them are in {log}", "python3 -m labkit doctor")


def free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _private(path, flags):
    return os.open(path, flags, 0o600)
