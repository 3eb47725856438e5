"""A private node starts anywhere, is closed to others, is shared by who is there, and leaves nothing running."""
import base64
import os
import re
import socket
import stat
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.broker.holder import Holder, survivors

OTHERS = stat.S_IRWXG | stat.S_IRWXO

#: what a machine's own RabbitMQ, another node's settings, or a careless shell may have left in the environment
UNHELPFUL = {
    "RABBITMQ_NODENAME": "rabbit@elsewhere", "RABBITMQ_NODE_PORT": "5672", "RABBITMQ_CONFIG_FILE": "/nonexistent/rabbitmq", "RABBITMQ_CONF_ENV_FILE": "/dev/null",
    "RABBITMQ_USE_LONGNAME": "true", "RABBITMQ_SERVER_START_ARGS": "nonsense", "RABBITMQ_MNESIA_BASE": "/nonexistent", "RABBITMQ_LOGS": "/nonexistent/log",
    "NODENAME": "rabbit@elsewhere", "USE_LONGNAME": "true", "CONFIG_FILE": "/nonexistent/rabbitmq", "SERVER_ERL_ARGS": "nonsense",
    "ERL_FLAGS": "-bad", "ERL_AFLAGS": "-sname", "ERL_LIBS": "/nonexistent", "ERL_EPMD_PORT": "1", "ERL_INETRC": "/nonexistent", "ERLANG_COOKIE": "x",
    "NOTIFY_SOCKET": "/nonexistent",
}


@pytest.fixture(scope="module")
def holder(server, tmp_path_factory):
    """Holds a node that was started in an unhelpful environment, in a folder with an unusual name, beside a foreign cookie."""
    state = tmp_path_factory.mktemp("späce d (it's)") / "$HOME"
    home = tmp_path_factory.mktemp("home")
    (home / ".erlang.cookie").write_text("FOREIGN")
    (home / ".erlang.cookie").chmod(0o444)
    (home / ".erlang").write_text("halt(7).")
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 5672))
            taken.listen()
        except OSError:
            pass  # somebody else has it, which is as good
        holder = Holder(state, environ={"PATH": os.environ["PATH"], "HOME": str(home), **UNHELPFUL}, server=server)
    yield holder
    holder.kill()
    assert survivors(holder.family) == []


def test_a_node_starts_in_an_unhelpful_environment(holder):
    assert re.fullmatch(r"RabbitMQ \d+\.\d+\.\d+, a private node on 127\.0\.0\.1:\d+", holder.found["line"])
    assert holder.found["version"] in holder.found["line"]


def test_every_socket_of_a_node_is_on_loopback(holder):
    listening = {(connection.laddr.ip, connection.laddr.port) for process in holder.family for connection in process.net_connections("inet")
                 if connection.status == psutil.CONN_LISTEN}
    assert {ip for ip, _ in listening} <= {"127.0.0.1", "::1"}
    assert {holder.found["port"], holder.found["management_port"]} < {port for _, port in listening}
    assert len({port for _, port in listening}) == 4, "AMQP, the management page, Erlang's distribution, epmd"


def test_a_second_process_joins_the_node(holder, server):
    state = Path(holder.found["home"]).parents[1]
    second = Holder(state, server=server)
    assert (second.found["port"], second.found["fresh"]) == (holder.found["port"], False)
    second.leave()
    assert all(process.is_running() for process in holder.family)


def test_no_file_of_a_node_is_open_to_others(holder):
    home = Path(holder.found["home"])
    assert [path for path in (home.parent, home, *home.rglob("*")) if not path.is_symlink() and path.lstat().st_mode & OTHERS] == []


def test_the_password_is_in_no_command_line_environment_or_log(holder):
    password = holder.found["password"]
    told = [text for process in holder.family for text in (*process.cmdline(), *process.environ().values())]
    assert not any(password in text for text in told)
    home = Path(holder.found["home"])
    assert password not in (home / "guard.log").read_text() + (home / "node" / "console.log").read_text(errors="replace")


def test_the_management_page_opens_with_the_password_only(holder):
    page = f"http://127.0.0.1:{holder.found['management_port']}/api/whoami"
    login = base64.b64encode(f"{holder.found['username']}:{holder.found['password']}".encode()).decode()
    assert holder.found["username"] in urllib.request.urlopen(urllib.request.Request(page, headers={"Authorization": f"Basic {login}"})).read().decode()
    guest = base64.b64encode(b"guest:guest").decode()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(urllib.request.Request(page, headers={"Authorization": f"Basic {guest}"}))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process's limits")
def test_the_number_of_open_files_is_capped(holder):
    assert {process.rlimit(psutil.RLIMIT_NOFILE)[0] <= 8192 for process in holder.family} == {True}
