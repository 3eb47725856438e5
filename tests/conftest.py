"""The suite's shared fixtures and hooks."""
from tests.servers import (  # noqa: F401
    broker, pytest_configure, pytest_generate_tests, pytest_runtest_makereport, pytest_sessionfinish, pytest_terminal_summary)
