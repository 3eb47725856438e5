"""The fixtures `broker` and `server`: a test that asks for one runs once on every RabbitMQ that LABKIT_RABBITMQ_SERVERS names.

The names are separated like those of PATH; an empty one, or none at all, stands for the broker that the lab finds by itself.
Without any broker the tests are skipped; with CI set they fail. LABKIT_REQUIRE_VERSIONS, such as "3.10 4.0 4.3", makes the
session fail unless broker tests ran on each of these versions and none of them was skipped.
"""
import os

import pytest

from labkit.broker import find, node
from labkit.broker.finding import which
from labkit.errors import BrokerError

_seen = pytest.StashKey[dict]()


def servers():
    """Returns the servers to test on as (server, name) pairs; the server None is what the lab finds by itself."""
    named = dict.fromkeys(os.environ.get("LABKIT_RABBITMQ_SERVERS", "").split(os.pathsep))
    return [(server or None, _name(server)) for server in named]


@pytest.fixture(scope="session")
def broker(request):
    """A broker that answers; a private node stays for as long as the tests on its server run."""
    try:
        found = find(server=request.param)
    except BrokerError as error:
        _do_without(str(error))
    with found:
        yield found


@pytest.fixture(scope="session")
def server(request):
    """A rabbitmq-server that a test may start."""
    if found := request.param or node.installed():
        return str(found)
    if os.environ.get("LABKIT_AMQP_URL"):
        pytest.skip("the broker is somebody else's, and no RabbitMQ is installed that could be started")
    _do_without("no RabbitMQ is installed")


def pytest_configure(config):
    config.stash[_seen] = {"ran": set(), "skipped": []}


def pytest_generate_tests(metafunc):
    pairs = servers()
    for fixture in {"broker", "server"}.intersection(metafunc.fixturenames):
        metafunc.parametrize(fixture, [server for server, _ in pairs], ids=[name for _, name in pairs], indirect=True, scope="session")


def pytest_collection_modifyitems(items):
    """Skips the notebooks' cells that need a broker to kill, where only somebody else's is to be had."""
    if which() is None:
        for item in items:
            if hasattr(item, "cell") and any(verb in item.cell.source for verb in (".survival(", ".expiry(")):
                item.add_marker(pytest.mark.skip(reason="no RabbitMQ is installed that could be killed"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if {"broker", "server"}.intersection(item.fixturenames):
        seen = item.config.stash[_seen]
        if report.skipped:
            seen["skipped"].append(item.nodeid)
        elif report.when == "call" and "broker" in item.fixturenames:
            seen["ran"].add(item.funcargs["broker"].version)
    return report


def pytest_sessionfinish(session):
    if _missing(session.config) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    for line in _missing(config):
        terminalreporter.write_line(line, red=True)


def _do_without(reason):
    """The one way to skip: only where nobody has promised that there is a broker."""
    if os.environ.get("CI") or os.environ.get("LABKIT_REQUIRE_VERSIONS"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _missing(config):
    """Returns what LABKIT_REQUIRE_VERSIONS asks for and the session did not do, one line each."""
    required, seen = os.environ.get("LABKIT_REQUIRE_VERSIONS", "").split(), config.stash[_seen]
    lines = [f"No broker test ran on RabbitMQ {version}." for version in required
             if not any(f"{ran}.".startswith(f"{version}.") for ran in seen["ran"])]
    return lines + [f"Skipped, which is a failure here: {name}" for name in seen["skipped"] if required]


def _name(server):
    path = server or node.installed()
    return (path and node.version_of(path)) or str(server or "found")
