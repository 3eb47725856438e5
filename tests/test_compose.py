"""What docker-compose.yml promises: loopback only, versions that do not move, and a broker where labkit looks for one."""
import re
from pathlib import Path

import pytest
import yaml

from labkit.broker import finding

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
SERVICES = yaml.safe_load(TEXT)["services"]
DEFAULTS = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT))


@pytest.mark.parametrize("service", SERVICES)
def test_every_port_is_published_on_loopback_and_can_be_changed(service):
    assert SERVICES[service]["ports"]
    for port in SERVICES[service]["ports"]:
        assert re.fullmatch(r"127\.0\.0\.1:\$\{LABKIT_\w+:-\d+\}:\d+", port)


def test_every_image_is_pinned_to_a_full_version():
    base = re.findall(r"^FROM (\S+)", (ROOT / "docker/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    for image in [SERVICES["rabbitmq"]["image"], *base]:
        assert re.fullmatch(r"\w+:\d+\.\d+\.\d+(-\w+)*", image)
    assert re.fullmatch(r"postgres:\d+\.\d+", SERVICES["postgres"]["image"])          # whose versions have two parts


def test_the_health_check_leaves_the_cookie_to_the_node():
    assert SERVICES["rabbitmq"]["healthcheck"]["test"].startswith("test -e /var/lib/rabbitmq/.erlang.cookie && rabbitmq-diagnostics ")


def test_labkit_looks_for_the_broker_where_compose_puts_it(monkeypatch):
    for name in ("LABKIT_AMQP_URL", "LABKIT_RABBITMQ_SERVER", *DEFAULTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(finding, "which", lambda server: None)
    monkeypatch.setattr(finding, "_dotenv", dict)
    monkeypatch.setattr(finding.reach, "version", lambda address: "4.3.6")
    broker = finding.find()
    assert broker.origin == "compose"
    found = broker.address
    assert (found.host, str(found.port), found.username, found.password.reveal()) == (
        "127.0.0.1", DEFAULTS["LABKIT_COMPOSE_PORT"], DEFAULTS["LABKIT_COMPOSE_USER"], DEFAULTS["LABKIT_COMPOSE_PASSWORD"])


def test_the_environment_moves_the_broker_for_both(monkeypatch):
    monkeypatch.delenv("LABKIT_AMQP_URL", raising=False)
    monkeypatch.setenv("LABKIT_COMPOSE_PORT", "5999")
    monkeypatch.setenv("LABKIT_COMPOSE_USER", "someone")
    monkeypatch.setattr(finding, "which", lambda server: None)
    monkeypatch.setattr(finding.reach, "version", lambda address: "4.3.6")
    found = finding.find().address
    assert (found.port, found.username) == (5999, "someone")
    assert "127.0.0.1:${LABKIT_COMPOSE_PORT:-5672}:5672" in SERVICES["rabbitmq"]["ports"]
    assert SERVICES["rabbitmq"]["environment"]["RABBITMQ_DEFAULT_USER"] == "${LABKIT_COMPOSE_USER:-lab}"
