"""What the system must provide is installed only after a yes, and with no service started, now or later."""
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from labkit.setup import SetupError, environment, packages


@pytest.fixture
def bare(monkeypatch):
    """A Debian where nothing is installed; what would be carried out is collected."""
    done = []
    monkeypatch.setattr(packages, "broker_available", lambda: bool(done))
    monkeypatch.setattr(packages.shutil, "which", lambda name: f"/usr/bin/{name}" if name in ("apt-get", "sudo") else None)
    monkeypatch.setattr(packages, "run", lambda what, command, *_, **__: done.append([str(part) for part in command]))
    monkeypatch.setattr(packages.os, "geteuid", lambda: 0)
    monkeypatch.setattr(environment, "ready", lambda: True)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(packages.sys, "stdin", None)
    return done


def test_without_a_yes_and_without_a_terminal_nothing_is_installed_and_the_command_is_told(bare):
    with pytest.raises(SetupError, match="sudo apt-get install --no-install-recommends rabbitmq-server"):
        packages.ensure(yes=False)
    assert bare == []


def test_yes_installs_and_so_does_ci(bare, monkeypatch):
    packages.ensure(yes=True)
    assert bare[0][0] == "sh" and bare[0][-1] == "rabbitmq-server"
    bare.clear()
    monkeypatch.setenv("CI", "true")
    packages.ensure(yes=False)
    assert len(bare) == 1


def test_on_a_terminal_a_no_is_a_no_and_an_empty_answer_a_yes(bare, monkeypatch):
    class Terminal:
        isatty = staticmethod(lambda: True)
    monkeypatch.setattr(packages.sys, "stdin", Terminal)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    with pytest.raises(SetupError, match="you said no"):
        packages.ensure(yes=False)
    assert bare == []
    monkeypatch.setattr("builtins.input", lambda _: "")
    packages.ensure(yes=False)
    assert len(bare) == 1


def test_a_user_installs_by_sudo_and_without_sudo_gets_the_command_for_root(bare, monkeypatch):
    monkeypatch.setattr(packages.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(packages, "_let_sudo_ask", lambda _: None)
    packages.ensure(yes=True)
    assert bare[0][:3] == ["sudo", "-n", "sh"]
    bare.clear()
    monkeypatch.setattr(packages.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    with pytest.raises(SetupError, match="as root: apt-get install"):
        packages.ensure(yes=True)


def test_a_debian_python_that_cannot_make_environments_gets_its_package_in_the_same_step(bare, monkeypatch):
    monkeypatch.setattr(environment, "ready", lambda: False)
    monkeypatch.setattr(environment, "can_make_venv", lambda: False)
    packages.ensure(yes=True)
    assert bare[0][-2].startswith("python3.") and bare[0][-2].endswith("-venv") and bare[0][-1] == "rabbitmq-server"


@pytest.mark.parametrize("program, command", [("dnf", "sudo dnf install rabbitmq-server"), ("pacman", "sudo pacman -S rabbitmq"),
                                              ("apk", "sudo apk add rabbitmq-server"), ("docker", "docker compose up -d rabbitmq"),
                                              (None, "conda install -c conda-forge rabbitmq-server")])
def test_elsewhere_the_exact_command_for_this_system_is_told(bare, monkeypatch, program, command):
    monkeypatch.setattr(packages.shutil, "which", lambda name: name if name == program else None)
    with pytest.raises(SetupError) as told:
        packages.ensure(yes=True)
    assert command in str(told.value) and bare == []


def test_homebrew_installs_too(bare, monkeypatch):
    monkeypatch.setattr(packages.shutil, "which", lambda name: name if name == "brew" else None)
    packages.ensure(yes=True)
    assert bare == [["brew", "install", "rabbitmq"]]


@pytest.mark.parametrize("name", ["LABKIT_AMQP_URL", "LABKIT_RABBITMQ_SERVER"])
def test_a_broker_that_is_named_means_that_nothing_is_installed(monkeypatch, name):
    monkeypatch.setattr(packages.node, "installed", lambda: None)
    monkeypatch.setenv(name, "something")
    assert packages.broker_available()


@pytest.mark.parametrize("answer, available", [(b"\x01\x00\x00", True), (b"HTTP/1.1 400 Bad Request", False), (b"", False)])
def test_only_a_compose_service_that_speaks_amqp_counts_as_a_broker(monkeypatch, answer, available):
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(8)
                connection.sendall(answer)
        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setattr(packages.node, "installed", lambda: None)
        for name in ("LABKIT_AMQP_URL", "LABKIT_RABBITMQ_SERVER"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("LABKIT_COMPOSE_PORT", str(server.getsockname()[1]))
        assert packages.broker_available() is available
    assert not packages.broker_available()


@pytest.fixture
def debian(tmp_path):
    """debian.sh with the places it touches moved to a folder, and programs that only write down that they were called."""
    script = packages.DEBIAN_SCRIPT.read_text()
    for place in ("/usr/sbin/policy-rc.d", "/lib/systemd/system", "/run/systemd/system", "/var/lib/apt/lists/lock", "/var/cache/apt/archives/lock"):
        assert place in script
        moved = tmp_path / place.strip("/").replace("/", "-")
        script = script.replace(place, str(moved))
    tmp_path.joinpath("debian.sh").write_text(script)
    units = tmp_path / "lib-systemd-system"
    units.mkdir()
    (tmp_path / "run-systemd-system").mkdir()
    policy = tmp_path / "usr-sbin-policy-rc.d"
    fakes = tmp_path / "bin"
    fakes.mkdir()

    def fake(name, text=""):
        fakes.joinpath(name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n{text}\n')
        fakes.joinpath(name).chmod(0o755)

    for name in ("dpkg", "dpkg-query", "systemctl", "update-rc.d"):
        fake(name)
    fake("apt-get", f'[ "$1" = update ] && exit; {policy}; echo "policy says $?" >> {tmp_path}/calls\n'
                    f'touch {units}/rabbitmq-server.service {units}/epmd.service {units}/epmd.socket')

    class Debian:
        environ = {"PATH": f"{fakes}:{os.environ['PATH']}"}
        command = ["sh", str(tmp_path / "debian.sh"), "rabbitmq-server"]
        calls = property(lambda self: tmp_path.joinpath("calls").read_text())

        def run(self):
            return subprocess.run(self.command, env=self.environ, capture_output=True, timeout=30).returncode

    made = Debian()
    made.fake, made.policy, made.folder = fake, policy, tmp_path
    return made


def test_no_service_may_start_while_debian_installs_and_none_is_left_switched_on(debian):
    assert debian.run() == 0
    assert "policy says 101" in debian.calls
    assert not debian.policy.exists()
    for unit in ("rabbitmq-server.service", "epmd.service", "epmd.socket"):
        assert f"systemctl --quiet disable {unit}" in debian.calls


def test_services_that_were_installed_before_are_left_as_they_are(debian):
    debian.fake("dpkg-query", "printf installed")
    assert debian.run() == 0
    assert "systemctl" not in debian.calls and "update-rc.d" not in debian.calls


def test_somebody_elses_policy_is_used_and_left_alone(debian):
    theirs = "#!/bin/sh\nexit 104\n"
    debian.policy.write_text(theirs)
    debian.policy.chmod(0o755)
    assert debian.run() == 0
    assert "policy says 104" in debian.calls and debian.policy.read_text() == theirs


def test_a_policy_that_a_killed_set_up_left_is_taken_away(debian):
    debian.fake("apt-get", 'kill -KILL $PPID')
    assert debian.run() == -signal.SIGKILL
    assert debian.policy.exists()
    debian.fake("apt-get")
    assert debian.run() == 0
    assert not debian.policy.exists()


@pytest.mark.parametrize("ending, code", [("exit 100", 100), ("kill -TERM $PPID", 143), ("kill -INT $PPID", 130), ("kill -HUP $PPID", 129)])
def test_the_policy_is_taken_away_however_the_installation_ends(debian, ending, code):
    debian.fake("apt-get", f'[ "$1" = update ] || {{ {ending}; }}')
    assert debian.run() == code
    assert not debian.policy.exists()


def test_package_lists_that_cannot_be_renewed_do_not_stop_an_installation_from_what_is_here(debian):
    debian.fake("apt-get", '[ "$1" = install ]')
    assert debian.run() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("held", ["var-lib-apt-lists-lock", "var-cache-apt-archives-lock"])
def test_an_installation_waits_for_another_apt(debian, held):
    with open(debian.folder / held, "a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        ours = subprocess.Popen(debian.command, env=debian.environ, stdout=subprocess.PIPE)
        while not _waits_for_a_lock(ours):
            assert ours.poll() is None, "it did not wait"
        assert "apt-get" not in debian.calls
    ours.communicate(timeout=30)
    assert ours.returncode == 0 and "apt-get install" in debian.calls and "DPkg::Lock::Timeout=300" in debian.calls


def _waits_for_a_lock(process):
    """Tells whether a process below this one stands in line for a lock."""
    below = {str(child.pid) for child in psutil.Process(process.pid).children(recursive=True)}
    return any(line.split()[1] == "->" and line.split()[5] in below for line in open("/proc/locks"))
