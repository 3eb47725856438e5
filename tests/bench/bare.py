"""The same work on the same messages in bare pika and sqlite3 or psycopg, as a person would write it in a script: what labkit is measured against."""

import hashlib
import json
import os
import signal
import sqlite3
import tempfile

import pika
import psycopg

from labkit import sql
from labkit.databases.sqlite import SqliteHome, SqlitePlace
from labkit.ledger import count_effects
from labkit.message import POSITION_HEADER, reminders
from labkit.topology import work_arguments

QUORUM = {**work_arguments("quorum", None, None)}


class Bare:
    """A script's own connection to the broker."""

    def __init__(self, address):
        self._address = address
        self.channel = pika.BlockingConnection(address.parameters()).channel()
        self.channel.confirm_delivery()

    def kill_once(self, queue: str) -> None:
        """One message, one worker forked and killed between effect and ack, a second one forked that settles it."""
        self.channel.queue_declare(queue, durable=True, arguments=QUORUM)
        with tempfile.TemporaryDirectory() as folder:
            place = SqliteHome(folder).new()
            self._publish(queue, 1)
            for _ in range(2):
                if not (pid := os.fork()):
                    self._work(queue, os.fspath(place))
                os.waitpid(pid, 0)
            assert count_effects(place) == {"invoice-1:reminder": 2}
        self.channel.queue_delete(queue)

    def consume(self, queue: str, count: int, place) -> None:
        """Handles `count` messages in this process at prefetch 100, with the statements that the ledger uses."""
        database, begin, log, claim, record = _open(place)
        channel = pika.BlockingConnection(self._address.parameters()).channel()
        channel.basic_qos(prefetch_count=100)
        left = count

        def handle(channel, method, properties, body):
            nonlocal left
            message = json.loads(body)
            key, asked = message["effect_key"], json.dumps(message["payload"], sort_keys=True)
            database.execute(log, (properties.message_id, key, 1, properties.message_id)).fetchone()
            database.execute(begin)
            if database.execute(claim, (key, hashlib.sha256(asked.encode()).hexdigest()[:16])).rowcount:
                database.execute(record, (key, json.dumps({})))
            database.execute("COMMIT")
            channel.basic_ack(method.delivery_tag)
            left -= 1
            if not left:
                channel.stop_consuming()
        channel.basic_consume(queue, handle)
        channel.start_consuming()
        channel.connection.close()
        database.close()

    def _publish(self, queue: str, count: int) -> None:
        for position, message in enumerate(reminders(count), 1):
            self.channel.basic_publish("", queue, message.body(), pika.BasicProperties(
                content_type="application/json", delivery_mode=2, message_id=message.message_id, correlation_id=message.correlation_id,
                headers={POSITION_HEADER: position}), mandatory=True)

    def _work(self, queue: str, path: str) -> None:
        channel = pika.BlockingConnection(self._address.parameters()).channel()
        channel.basic_qos(prefetch_count=1)
        database = sqlite3.connect(path, isolation_level=None)
        for method, properties, body in channel.consume(queue):
            key = json.loads(body)["effect_key"]
            database.execute(sql.LOG_DELIVERY, (properties.message_id, key, 1, properties.message_id)).fetchone()
            database.execute(sql.RECORD, (key, "{}"))
            if not method.redelivered:
                os.kill(os.getpid(), signal.SIGKILL)
            channel.basic_ack(method.delivery_tag)
            channel.basic_qos(prefetch_count=1)       # a round trip, so that the ack is known to have arrived
            os._exit(0)


def _open(place) -> tuple:
    """Returns a connection, and the text of: begin, the delivery log, the key, the effect."""
    statements = (sql.LOG_DELIVERY, sql.CLAIM_KEY, sql.RECORD)
    if isinstance(place, SqlitePlace):
        database = sqlite3.connect(place, isolation_level=None)
        database.execute("PRAGMA synchronous = NORMAL")
        return database, "BEGIN IMMEDIATE", *statements
    database = psycopg.connect(place.wire["conninfo"], autocommit=True)
    database.execute(f"SET search_path TO {place.schema}")
    return database, "BEGIN", *(statement.replace("?", "%s") for statement in statements)
