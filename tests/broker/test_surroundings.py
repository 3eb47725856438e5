"""What a machine may have in a node's way: a home that cannot be used, limits, old data, a second checkout."""
import hashlib
import os
import resource
import shutil
from pathlib import Path

import psutil
import pytest

from tests.broker.holder import ROOT, Holder, processes_of, survivors
from tests.servers import servers


@pytest.fixture(scope="module")
def newest():
    """The last of the servers: what is shown here does not depend on RabbitMQ's version."""
    return servers()[-1][0]


def test_a_home_that_nobody_can_write_an_enormous_limit_and_a_service_manager_do_not_matter(tmp_path, newest):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        holder = Holder(tmp_path, environ={**os.environ, "HOME": "/proc", "RUNNING_UNDER_SYSTEMD": "true", "NOTIFY_SOCKET": "/nonexistent"}, server=newest)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    holder.kill()
    assert survivors(holder.family) == []


def test_the_data_of_a_killed_node_and_of_another_version_is_not_in_the_way(tmp_path, newest):
    old = Holder(tmp_path, server=servers()[0][0])
    for process in old.family:
        process.suspend()                             # so that none of them cleans up
    psutil.Process(old.found["guard"]).kill()
    for process in old.family[1:]:
        process.kill()
    old.kill()
    assert survivors(old.family) == []
    left, here = Path(old.found["home"]), tmp_path / "nodes" / _name(newest, old)
    if left != here:
        left.rename(here)
    data = here / "node" / "data"
    stale = set(os.listdir(data))
    assert stale, "a killed node leaves its data"
    new = Holder(tmp_path, server=newest)
    assert new.found["home"] == str(here) and new.found["fresh"] and new.found["username"] != old.found["username"]
    assert not stale.intersection(os.listdir(data))
    new.leave()
    assert survivors(new.family) == []


def test_two_checkouts_at_once_have_a_node_each_whatever_their_folders_are_called(tmp_path, newest):
    holders = []
    for name in ("my checkout", "größe $(touch x); \"'&%"):
        shutil.copytree(ROOT / "labkit", tmp_path / name / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / name / "pyproject.toml").touch()
        holders.append(Holder(None, wait=False, checkout=tmp_path / name, server=newest))
    first, second = (holder.tell() for holder in holders)
    assert first.found["home"].startswith(f"{tmp_path}/my checkout/.labkit/")
    assert first.found["port"] != second.found["port"] and first.found["fresh"] and second.found["fresh"]
    first.leave()
    assert survivors(first.family) == []
    assert all(process.is_running() for process in second.family)
    second.leave()
    assert survivors(second.family) == [] and processes_of(tmp_path) == []


def _name(server, holder):
    """The name of the folder in which this server's node will be."""
    return hashlib.sha256(os.fsencode(server)).hexdigest()[:12] if server else Path(holder.found["home"]).name
