"""A process that holds a broker and can be killed, as a notebook's kernel can; and all that a node consists of."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20
LINGER_S = 0.5

_CODE = """
import json, sys
from labkit.broker import find, node
node.LINGER_S = {linger}
found = find(**json.loads(sys.argv[1]))
held = found._node
print(json.dumps(dict(line=str(found), version=found.version, port=found.address.port, management_port=held.management_port, home=str(held._home),
                      username=found.address.username, password=found.address.password.reveal(), guard=held._guard_pid, fresh=held.fresh)), flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that has found a broker. `found` is what it tells of it; `family` are the node's processes."""

    def __init__(self, state, wait=True, environ=None, checkout=ROOT, **arguments):
        """state: the folder of its nodes, or None for the one that the checkout chooses; arguments: those of `find`."""
        environ = {**(os.environ if environ is None else environ), "LABKIT_STATE": str(state or ""), "PYTHONPATH": str(checkout)}
        environ.pop("LABKIT_AMQP_URL", None)
        self.process = subprocess.Popen([sys.executable, "-c", _CODE.format(linger=LINGER_S), json.dumps(arguments)], cwd=checkout, env=environ, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if wait:
            self.tell()

    def tell(self):
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.found = json.loads(line)
        guard = psutil.Process(self.found["guard"])
        self.family = [guard, *guard.children(recursive=True)]
        return self

    def kill(self):
        self.process.kill()
        self.process.communicate()

    def leave(self):
        """Lets the process come to its end."""
        assert self.process.communicate(timeout=PATIENCE_S)[1] == ""

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=PATIENCE_S)[1]


def survivors(family, seconds=PATIENCE_S):
    """Waits for the end of all these processes, and returns those that go on."""
    deadline = time.monotonic() + seconds
    while (alive := [process for process in family if _runs(process)]) and time.monotonic() < deadline:
        psutil.wait_procs(alive, timeout=0.1)
    return alive


def processes_of(state):
    """Returns the processes that work below this state folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(state) in " ".join([process.cwd(), *process.cmdline(), *process.environ().values()]) and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            pass
    return found


def _runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # ended, and not yet asked for by its parent
    except psutil.NoSuchProcess:
        return False
