"""A private PostgreSQL for the suite: its own folder, a socket in it, no port; and the fixtures of what runs on both databases.

Where none is installed these tests run on SQLite only; with LABKIT_REQUIRE_POSTGRES set they then fail. LABKIT_POSTGRES_URL
names one that is there already; the notebooks are told of the private one by it.
"""

import glob
import os
import pathlib
import shutil
import subprocess
import tempfile

import pytest

_URL = "postgresql://lab@/lab?host={folder}"
#: what a laptop's laboratory needs, and none of the disk's waits
_SETTINGS = {"listen_addresses": "", "unix_socket_directories": "{folder}", "fsync": "off", "max_connections": "60"}


class PostgresServer:
    """A server that can be started, stopped and started again."""

    def __init__(self, programs: pathlib.Path):
        self._programs, self._folder = programs, pathlib.Path(tempfile.mkdtemp(prefix="pg-"))
        self._user = {"user": "nobody"} if os.geteuid() == 0 else {}          # PostgreSQL refuses root
        self.url = _URL.format(folder=self._folder)
        if self._user:
            shutil.chown(self._folder, "nobody")
        self._call("initdb", "--username=lab", "--auth=trust", "--no-sync", "--locale=C", "--encoding=UTF8")
        self.start()
        self._call("createdb", "--host", str(self._folder), "--username=lab", "lab", data=False)

    def ask_for_a_password(self, user: str) -> None:
        """Lets this user in with the right password only, after a restart."""
        rules = self._folder / "data" / "pg_hba.conf"
        rules.write_text(f"local all {user} scram-sha-256\n" + rules.read_text())
        self.stop()
        self.start()

    def start(self) -> None:
        """Starts it, and returns when it takes connections."""
        settings = " ".join(f"-c {name}={value.format(folder=self._folder) or chr(39) * 2}" for name, value in _SETTINGS.items())
        self._call("pg_ctl", "start", "--wait", "--silent", "--log", str(self._folder / "log"), "--options", settings)

    def stop(self) -> None:
        """Ends it as a crash would: no connection is waited for."""
        command, options = self.stopping
        subprocess.run(command, check=True, **options)

    @property
    def stopping(self) -> tuple[list[str], dict]:
        """The command that ends it, with the options of subprocess.run: plain values, which a handler can take along."""
        return self._command("pg_ctl", "stop", "--wait", "--silent", "--mode", "immediate")

    def remove(self) -> None:
        """Ends it where it runs, and takes its folder away."""
        if (self._folder / "data" / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _call(self, program: str, *arguments: str, data: bool = True) -> None:
        command, options = self._command(program, *arguments, data=data)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **options)

    def _command(self, program: str, *arguments: str, data: bool = True) -> tuple[list[str], dict]:
        where = ["--pgdata", str(self._folder / "data")] if data else []
        return [str(self._programs / program), *where, *arguments], {"cwd": str(self._folder), **self._user}


def programs() -> pathlib.Path | None:
    """Returns the folder of PostgreSQL's server programs, the newest, where they are installed."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), key=lambda path: int(path.split("/")[4])) or filter(None, [shutil.which("initdb")])
    return next((pathlib.Path(path).resolve().parent for path in reversed(list(found))), None)


def url() -> str:
    """Returns the URL of the suite's PostgreSQL, which is started at the first call; fails or skips where there is none."""
    if not _server:
        if named := os.environ.get("LABKIT_POSTGRES_URL"):
            return named
        if not (found := programs()):
            (pytest.fail if os.environ.get("LABKIT_REQUIRE_POSTGRES") else pytest.skip)("no PostgreSQL is installed")
        _server.append(PostgresServer(found))
    return _server[0].url


def another() -> PostgresServer:
    """Returns a server that a test may do with as it likes; fails or skips where none is installed."""
    if not (found := programs()):
        url()                                         # skips, or fails where one is required
        pytest.skip("the PostgreSQL is somebody else's")
    return PostgresServer(found)


_server: list[PostgresServer] = []


def pytest_collection_finish(session):
    if any(item.path.suffix == ".ipynb" for item in session.items) and programs():
        os.environ.setdefault("LABKIT_POSTGRES_URL", url())


def pytest_unconfigure():
    if _server:
        _server.pop().remove()
