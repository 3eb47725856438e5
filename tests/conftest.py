"""The suite's shared fixtures and hooks."""
import signal

import pytest

from tests import postgres
from tests.postgres import pytest_collection_finish, pytest_unconfigure  # noqa: F401
from tests.servers import (  # noqa: F401
    broker, pytest_collection_modifyitems, pytest_configure, pytest_generate_tests, pytest_runtest_makereport, pytest_sessionfinish, pytest_terminal_summary, server)

signal.signal(signal.SIGINT, signal.default_int_handler)                      # which a shell has its background jobs ignore
signal.signal(signal.SIGHUP, signal.SIG_DFL)                                  # and nohup this one


@pytest.fixture(scope="session")
def lab(broker, request):
    """A lab on the broker under test, shared by the session; each run has its own queue and its own ledger."""
    from labkit import Lab
    with Lab(broker=broker, quiet=True) as lab:
        yield lab


@pytest.fixture(scope="session", params=["SQLite", "PostgreSQL"])
def either(broker, request):
    """A lab whose ledgers are in SQLite, and one whose ledgers are in PostgreSQL: what is tested on it holds on both."""
    from labkit import Lab
    with Lab(broker=broker, quiet=True, ledger=postgres.url() if request.param == "PostgreSQL" else None) as lab:
        yield lab


@pytest.fixture(scope="module")
def own(server):
    """A node of its own, to be killed or hurt."""
    from labkit.broker import find
    with find(private=True, server=server) as own:
        yield own


@pytest.fixture(scope="module")
def own_lab(own):
    """A lab on that node."""
    from labkit import Lab
    with Lab(broker=own, quiet=True) as lab:
        yield lab
