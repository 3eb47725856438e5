"""Whatever a run ends by, it leaves no queue and no exchange at the broker, and a closed lab no connection."""
import base64
import json
import urllib.request

import psutil
import pytest

from labkit import Lab, RetryPolicy, crash, hang, lose
from tests.engine import handlers
from tests.engine.test_live import until

RUNS = {
    "over": (handlers.once_then_ack, {}), "crash": (handlers.once_then_ack, {"faults": [crash.after("ack")]}),
    "lost ack": (handlers.once_then_ack, {"faults": [lose.ack()]}), "hang": (handlers.once_then_ack, {"faults": [hang.at("ack")]}),
    "deadline": (handlers.loop_for_ever, {"deadline_s": 1, "publish": "while", "rate": 2}), "dead letters": (handlers.raise_value_error, {"queue_type": "classic"}),
    "max_deliveries": (handlers.nack_always, {"max_deliveries": 3}), "gave up": (handlers.exit_with_three, {}),
    "never settled": (handlers.effect_only, {}), "broken channel": (handlers.ack_twice, {}), "automatic": (handlers.effect_only, {"acknowledge": "auto"}),
    "retries": (handlers.raise_value_error, {"retry": RetryPolicy(delays_ms=(10,), kinds={ValueError: "temporary"})}),
}


@pytest.fixture
def names(broker):
    """Asks the node for the names of its queues, exchanges or connections."""
    if broker.origin != "private":
        pytest.skip("only a node of our own is asked what it holds")
    login = base64.b64encode(f"{broker.address.username}:{broker.address.password.reveal()}".encode()).decode()

    def ask(what):
        request = urllib.request.Request(f"http://127.0.0.1:{broker._node.management_port}/api/{what}", headers={"Authorization": f"Basic {login}"})
        with urllib.request.urlopen(request) as answer:
            return {found["name"] for found in json.load(answer)}
    return ask


def test_no_run_leaves_a_queue_or_an_exchange(lab, names):
    exchanges = names("exchanges")
    for handler, arguments in RUNS.values():
        lab.run(handler, lab.reminders(3), **arguments)
    lab.race(handlers.effect_then_ack, lab.reminders(1)[0], limit=2)
    live = lab.start(handlers.loop_for_ever, lab.reminders(1), deadline_s=600)
    until(lambda: live.counts["deliveries"] == 1 and any(name.startswith(lab._prefix) for name in names("queues")))
    live.stop()
    live.wait()
    until(lambda: not any(name.startswith(lab._prefix) for name in names("queues")))
    assert names("exchanges") == exchanges


def test_a_lab_that_is_closed_under_a_run_leaves_no_connection_and_no_queue(broker, names):
    lab = Lab(broker=broker, quiet=True)
    live = lab.start(handlers.loop_for_ever, lab.reminders(3), workers=3, deadline_s=600)
    until(lambda: live.counts["deliveries"] == 3)
    workers = psutil.Process(lab._crew._server._process.pid).children()
    ports = {lab._session.connection._transport._sock.getsockname()[1], *(end.laddr.port for worker in workers for end in worker.net_connections("tcp"))}
    assert len(ports) >= 4

    def still_there():
        return {port for port in ports if any(f":{port} -> " in name for name in names("connections"))}
    until(lambda: len(still_there()) >= 4)
    lab.close()
    until(lambda: not still_there() and not any(name.startswith(lab._prefix) for name in names("queues")))
