"""A password is told to whoever asks for it by `broker login`, and is in nothing else that labkit writes or shows."""
import base64
import json
import os
import subprocess
import sys
import urllib.request
from urllib.parse import quote

import pytest

from labkit.broker import Address
from tests.broker.holder import PATIENCE_S, ROOT, processes_of, survivors

PASSWORD = "gehe1m:/@?#%[ü] 'ß\"&"

#: what a notebook does with a broker, and all that can be seen of it; the last line is an error with every frame's variables
_NOTEBOOK = """
import pathlib, sys, tempfile, traceback, psutil
from labkit import Lab, crash
from tests.engine import handlers
lab = Lab()
print(lab, repr(lab), repr(lab.broker), vars(lab), vars(lab.broker.address))
run = lab.run(handlers.once_then_ack, lab.reminders(2), faults=[crash.before("ack")])
print(run.verdict, repr(run), run._repr_html_(), run.events, run.facts)
saved = run.save(pathlib.Path(tempfile.mkdtemp()) / "run")
print(*[path.read_bytes() for path in saved.iterdir()])
for process in psutil.Process().children(recursive=True):
    print(process.cmdline(), process.environ())
"""
_REFUSED = """
import traceback
from labkit import Lab
try:
    Lab()
except Exception as error:
    print("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format()))
"""


def python(code, url):
    """Runs the code in a kernel's place, and returns all that it shows."""
    environ = {**os.environ, "LABKIT_AMQP_URL": url, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.fixture
def url(broker):
    """The URL of a user whose password is as awkward as can be."""
    if broker.origin != "private":
        pytest.skip("a user is made on a node of our own only")
    login = base64.b64encode(f"{broker.address.username}:{broker.address.password.reveal()}".encode()).decode()

    def manage(method, path, **body):
        request = urllib.request.Request(f"http://127.0.0.1:{broker._node.management_port}/api/{path}", json.dumps(body).encode(),
                                         {"Authorization": f"Basic {login}", "Content-Type": "application/json"}, method=method)
        urllib.request.urlopen(request).close()
    manage("PUT", "users/awkward", password=PASSWORD, tags="")
    manage("PUT", "permissions/%2F/awkward", configure=".*", write=".*", read=".*")
    yield f"amqp://awkward:{quote(PASSWORD, safe='')}@{broker.address.where}"
    manage("DELETE", "users/awkward")


def shows_password(text):
    return any(form in text for form in ("gehe1m", repr(PASSWORD)[1:-1], base64.b64encode(PASSWORD.encode()).decode()))


def test_a_notebook_shows_the_password_of_its_url_nowhere(url):
    shown = python(_NOTEBOOK, url)
    assert "from LABKIT_AMQP_URL" in shown and "holds" in shown and "labkit.forkserver" in shown
    assert not shows_password(shown)


def test_a_refused_login_shows_the_password_in_no_frame(url):
    shown = python(_REFUSED, url.replace("awkward", "nobody"))
    assert "refused the login" in shown
    assert not shows_password(shown)


def test_doctor_does_not_show_it_either(url):
    told = subprocess.run([sys.executable, "-m", "labkit", "doctor"], env={**os.environ, "LABKIT_AMQP_URL": url}, cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert "LABKIT_AMQP_URL" in told.stdout
    assert not shows_password(told.stdout + told.stderr)


def test_the_commands_start_tell_and_stop_a_node_and_only_login_tells_its_password(server, tmp_path):
    def labkit(command):
        environ = {**os.environ, "LABKIT_STATE": str(tmp_path), "LABKIT_RABBITMQ_SERVER": server}
        environ.pop("LABKIT_AMQP_URL", None)
        done = subprocess.run([sys.executable, "-m", "labkit", "broker", command], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=90)
        assert done.stderr == ""
        return done.returncode, done.stdout
    assert labkit("status")[0] == 1 and "No private node is running" in labkit("login")[1]
    said = [labkit("start"), labkit("status")]
    assert [code for code, _ in said] == [0, 0] and "until `broker stop`" in said[1][1]
    login = labkit("login")[1]
    password, port = login.split()[-1], int(login.split("127.0.0.1:")[1].split()[0].rstrip("\n"))
    family = processes_of(tmp_path)
    assert Address("127.0.0.1", port, "/", "", password).where in said[1][1]
    said.append(labkit("stop"))
    assert said[-1][0] == 0 and "Stopped" in said[-1][1] and labkit("status")[0] == 1
    assert not any(password in text for _, text in said)
    assert survivors(family, PATIENCE_S) == []
