"""Parts without a broker: the trace, the line, the account, the ledger, the message."""
import os
import resource
import socket
import sqlite3
import ssl
import tempfile

import pytest
from pika.adapters.utils.connection_workflow import AMQPConnectorStackTimeout

from labkit import LedgerError, Message, PlanError, link, steps, topology
from labkit.access import Access
from labkit.account import Account
from labkit.broker.address import Address, Secret
from labkit.databases.sqlite import SqliteHome
from labkit.topology import BROKEN
from labkit.ledger import Ledger, count_effects
from labkit.trace import CHUNK, Event, Reader, Writer


@pytest.fixture
def trace():
    with tempfile.TemporaryFile() as file:
        yield Writer(file.fileno()), Reader(file.fileno())


def test_the_reader_sees_what_was_written_in_order_and_once(trace):
    writer, reader = trace
    assert list(reader.read()) == []
    writer.write("ack", "before", 3, {})
    writer.write("ack", "after", 3, {"outcome": "sent"})
    assert [record[1:] for record in reader.read()] == [("ack", "before", 3, {}), ("ack", "after", 3, {"outcome": "sent"})]
    assert list(reader.read()) == []


def test_a_trace_grows_past_its_first_chunk(trace):
    writer, reader = trace
    details = [{"n": n, "text": "x" * (n % 300)} for n in range(3 * CHUNK // 150)]
    for detail in details:
        writer.write("receive", "before", 1, detail)
    assert [record[4] for record in reader.read()] == details


def test_a_text_too_long_for_the_trace_is_cut_and_the_rest_of_the_detail_kept(trace):
    writer, reader = trace
    writer.write("raised", "note", 0, {"error": "x" * CHUNK, "frames": [("cell.py", 3, "remind")]})
    (*_, detail), = reader.read()
    assert detail == {"error": "x" * 1000 + "…", "frames": [("cell.py", 3, "remind")]}


def test_a_detail_that_json_does_not_know_is_told_as_text(trace):
    writer, reader = trace
    writer.write("ledger.execute", "before", 1, {"statement": PlanError("no", "why", "now")})
    (*_, detail), = reader.read()
    assert detail == {"statement": str(PlanError("no", "why", "now"))}


def test_what_a_killed_writer_had_written_is_there():
    with tempfile.TemporaryFile() as file:
        if not (pid := os.fork()):
            writer = Writer(file.fileno())
            writer.write("ack", "before", 1, {})
            os.kill(os.getpid(), 9)
        os.waitpid(pid, 0)
        assert [record[1] for record in Reader(file.fileno()).read()] == ["ack"]


def test_frames_arrive_whole_however_they_are_cut():
    data = link.encode({"t": "job"}, b"\x00\x01") + link.encode({"t": "stop"})
    decoder = link.Decoder()
    frames = [frame for byte in data for frame in decoder.feed(bytes([byte]))]
    assert frames == [({"t": "job"}, b"\x00\x01"), ({"t": "stop"}, b"")]


def receive(account, lane, tag, position):
    account.take(Event(0, lane, "receive", "before", "m", "k", position, None, tag))


def answer(account, lane, tag, name="ack", **detail):
    account.take(Event(0, lane, name, "after", "m", "k", None, 1, tag, {"outcome": "sent", **detail}))


def published(count, **arguments):
    account = Account(**arguments)
    for position in range(1, count + 1):
        account.take(Event(0, "broker", "published", "note", "m", "k", position))
    return account


def test_an_ack_with_multiple_settles_every_earlier_delivery_of_its_lane():
    account = published(4)
    for tag in (1, 2, 3):
        receive(account, "worker 1", tag, tag)
    receive(account, "worker 2", 1, 4)
    answer(account, "worker 1", 2, multiple=True)
    assert account.outstanding == {(3, 0), (4, 0)}


def test_what_a_dead_worker_held_is_waiting_again_unless_another_has_it_by_now():
    account = published(2)
    receive(account, "worker 1", 1, 1)
    receive(account, "worker 1", 2, 2)
    receive(account, "worker 2", 1, 1)                # heard of before the death
    account.take(Event(0, "worker 1", "killed", "note"))
    assert account.places == {1: ["held"], 2: ["waiting"]}


def test_a_confirm_heard_of_after_the_ack_does_not_make_the_copy_wait_again():
    account = published(0)
    receive(account, "worker 1", 1, 1)
    answer(account, "worker 1", 1)
    account.take(Event(0, "broker", "published", "note", "m", "k", 1))
    assert (account.places, account.outstanding) == ({1: ["acked"]}, set())


def test_a_nack_heard_of_after_the_next_worker_got_the_message_takes_nothing_from_it():
    account = published(1)
    receive(account, "worker 1", 1, 1)
    receive(account, "worker 2", 1, 1)
    answer(account, "worker 1", 1, "nack", requeue=True)
    assert account.places == {1: ["held"]}
    answer(account, "worker 2", 1)
    assert account.places == {1: ["acked"]}


def test_a_dead_letter_heard_of_before_its_reject_stays_dead_lettered():
    account = published(1)
    receive(account, "worker 1", 1, 1)
    account.take(Event(0, "broker", "dead-lettered", "note", "m", "k", 1))
    answer(account, "worker 1", 1, "reject", requeue=False)
    assert (account.places, account.outstanding) == ({1: ["dead-lettered"]}, set())


@pytest.fixture
def books(tmp_path):
    place = SqliteHome(tmp_path).new()
    gate = steps.Gate(lambda *_: None, lambda *_: None, ())
    return Ledger(Access(place.wire, gate, lambda: None), "tests"), place


def test_record_once_refuses_the_second_and_record_does_not(books):
    shop_ledger, place = books
    assert [shop_ledger.record_once("a"), shop_ledger.record_once("a")] == ["recorded", "duplicate"]
    shop_ledger.record("b")
    shop_ledger.record("b")
    assert count_effects(place) == {"a": 1, "b": 2}


def test_a_full_disk_is_told_at_receive_and_nothing_is_logged(books):
    """SQLite commits an INSERT … RETURNING when its rows have been read to the end."""
    shop_ledger, place = books
    assert shop_ledger.log_delivery("m-1", "a", 1) == 1
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(f"{place.wire['path']}-wal"), old[1]))
    try:
        with pytest.raises(LedgerError, match="The ledger is away"):
            shop_ledger.log_delivery("m-2", "a", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert shop_ledger.log_delivery("m-2", "a", 1) == 1


def test_a_database_that_takes_no_more_names_the_next_step(books):
    shop_ledger, _ = books
    (pages,), = shop_ledger.execute("PRAGMA page_count")
    shop_ledger.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerError, match="Make room on the disk"):
        shop_ledger.record("a", text="x" * 100_000)
    shop_ledger.execute("PRAGMA query_only = on")
    with pytest.raises(LedgerError, match="Let its file be written"):
        shop_ledger.record("a")


def test_a_transaction_is_all_or_nothing(books):
    shop_ledger, place = books
    with pytest.raises(ZeroDivisionError), shop_ledger.transaction():
        shop_ledger.record_once("a")
        shop_ledger.remember("m-1")
        1 / 0
    assert (count_effects(place), shop_ledger.remember("m-1")) == ({}, "new")
    with shop_ledger.transaction():
        shop_ledger.record_once("a")
    assert (count_effects(place), shop_ledger.find("a"), shop_ledger.find("z")) == ({"a": 1}, {"effect_key": "a"}, None)


def test_the_inbox_remembers_a_message_once(books):
    shop_ledger, _ = books
    assert [shop_ledger.remember("m-1"), shop_ledger.remember("m-1"), shop_ledger.remember("m-2")] == ["new", "duplicate", "new"]


def test_the_database_itself_holds_the_key_unique(books):
    shop_ledger, _ = books
    shop_ledger.record_once("a")
    with pytest.raises(sqlite3.IntegrityError):
        shop_ledger.execute("INSERT INTO effect_keys (effect_key) VALUES (?)", ("a",))


@pytest.mark.parametrize("error", [AMQPConnectorStackTimeout("no answer"), socket.gaierror(-2, "not known"), ssl.SSLError("no certificate")])
def test_a_worker_that_cannot_connect_knows_that_whatever_pika_raises(monkeypatch, error):
    def refuse(_):
        raise error
    monkeypatch.setattr(topology.pika, "BlockingConnection", refuse)
    with pytest.raises(BROKEN, match=type(error).__name__):
        topology.connect(topology.wire(Address("127.0.0.1", 5672, "/", "lab", Secret("x"))))


@pytest.mark.parametrize("body", [b"", b"not json", b"\xff\xfe", b"[1, 2]", b'{"no": "key"}', b'{"effect_key": 7}'])
def test_a_body_that_is_not_a_message_is_a_value_error_and_nothing_else(body):
    with pytest.raises(ValueError):
        Message.from_wire(body, "m", "c")


def test_a_message_travels_as_it_is():
    message = Message("order-1:shipment", "m-1", "order-1", 3, "shipment.v2", {"parcels": [1, 2], "note": "ä"}, "case-9")
    assert Message.from_wire(message.body(), message.message_id, message.correlation_id) == message


@pytest.mark.parametrize("wrong", [lambda: Message(""), lambda: Message("k", payload={"x": object()}), lambda: Message("k", payload={"x": float("nan")}),
                                   lambda: Message("ä" * 128), lambda: Message("k", "m" * 256), lambda: Message("k", correlation_id="c" * 256)])
def test_a_message_that_cannot_travel_is_refused_when_it_is_made(wrong):
    with pytest.raises(PlanError):
        wrong()


def test_labkit_names_what_it_offers_and_loads_nothing_before_it_is_needed():
    import subprocess
    import sys
    told = subprocess.run([sys.executable, "-c", "import sys, labkit; print(sorted({'pika', 'matplotlib', 'ipywidgets', 'asyncio', 'sqlite3'} & set(sys.modules)));"
                           "print(all(getattr(labkit, name) for name in labkit.__all__))"], capture_output=True, text=True, check=True)
    assert told.stdout.split("\n")[:2] == ["[]", "True"]


@pytest.mark.parametrize("fields", [{"effect_key": "\ud800"}, {"effect_key": "k", "message_id": 5}, {"effect_key": "k", "correlation_id": b"x"}])
def test_a_message_whose_ids_cannot_be_sent_is_refused(fields):
    with pytest.raises(PlanError, match="not a text that can be sent"):
        Message(**fields)
