"""However a holder, a guard or a start ends, nothing of the node is left running, and the next start finds its way."""

import psutil
import pytest

from tests.broker.holder import LINGER_S, Holder, processes_of, survivors
from tests.servers import servers


@pytest.fixture(scope="module")
def newest(request):
    """The last of the servers: what is shown here does not depend on RabbitMQ's version."""
    return servers()[-1][0]


def test_a_node_outlives_the_first_of_two_holders_and_ends_with_the_second_killed_one(tmp_path, newest):
    first, second = Holder(tmp_path, wait=False, server=newest), Holder(tmp_path, wait=False, server=newest)
    first.tell(), second.tell()
    assert first.found["port"] == second.found["port"], "two that start at once get one node"
    assert {first.found["fresh"], second.found["fresh"]} == {True, False}
    first.kill()
    assert len(survivors(second.family, LINGER_S + 1)) == len(second.family)
    second.kill()
    assert survivors(second.family) == []
    assert processes_of(tmp_path) == []


def test_a_killed_guard_takes_the_node_with_it_and_the_next_holder_gets_a_new_one(tmp_path, newest):
    holder = Holder(tmp_path, server=newest)
    psutil.Process(holder.found["guard"]).kill()
    following = Holder(tmp_path, server=newest)
    assert survivors(holder.family) == []
    assert following.found["fresh"] and following.found["password"] != holder.found["password"]
    holder.leave(), following.leave()
    assert survivors(following.family) == []


def test_an_interrupted_start_leaves_nothing(tmp_path, newest):
    holder = Holder(tmp_path, wait=False, server=newest)
    while not (family := [process for process in processes_of(tmp_path) if process.name() in ("epmd", "beam.smp")]):
        assert holder.process.poll() is None
    assert "KeyboardInterrupt" in holder.interrupt()
    assert survivors(family) == []
    assert processes_of(tmp_path) == []


def test_a_starter_that_is_killed_leaves_nothing(tmp_path, newest):
    holder = Holder(tmp_path, wait=False, server=newest)
    while not (family := [process for process in processes_of(tmp_path) if process.name() in ("epmd", "beam.smp")]):
        assert holder.process.poll() is None
    holder.kill()
    assert survivors(family) == []
    assert survivors(processes_of(tmp_path)) == []


def test_a_node_of_ones_own_ends_with_its_killed_holder(tmp_path, newest):
    holder = Holder(tmp_path, private=True, server=newest)
    holder.kill()
    assert survivors(holder.family) == []


def test_what_a_killed_guard_of_a_private_node_left_is_removed_by_the_next(tmp_path, newest):
    holder = Holder(tmp_path, private=True, server=newest)
    psutil.Process(holder.found["guard"]).kill()
    holder.kill()
    assert survivors(holder.family) == []
    following = Holder(tmp_path, private=True, server=newest)
    assert [folder.name for folder in (tmp_path / "nodes").iterdir()] == [following.found["home"].rpartition("/")[2]]
    following.leave()
    assert list((tmp_path / "nodes").iterdir()) == []
