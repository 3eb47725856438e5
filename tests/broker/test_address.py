"""An address reads every URL, and shows its password nowhere."""
import pickle
import traceback

import pytest
from hypothesis import given, strategies as st

from labkit.broker import Address, Secret
from labkit.errors import BrokerError

PASSWORD = "k3 y/ö:@#%"
ENCODED = "k3%20y%2F%C3%B6%3A%40%23%25"


@pytest.mark.parametrize("url, host, port, vhost, username, tls", [
    ("amqp://", None, None, None, None, None),
    ("amqp://here", "here", 5672, "/", "guest", False),
    ("amqp://here/", "here", 5672, "/", "guest", False),
    ("amqp://here/%2F", "here", 5672, "/", "guest", False),
    ("amqp://here/lab", "here", 5672, "lab", "guest", False),
    ("amqp://here/a%2Fb%20c", "here", 5672, "a/b c", "guest", False),
    ("amqps://here", "here", 5671, "/", "guest", True),
    ("AMQP://here:1234", "here", 1234, "/", "guest", False),
    ("amqp://[::1]:1234/x", "::1", 1234, "x", "guest", False),
    (f"amqp://me%40work:{ENCODED}@here", "here", 5672, "/", "me@work", False),
    ("amqp://me@here", "here", 5672, "/", "me", False),
    ("amqp://here/lab?heartbeat=30", "here", 5672, "lab", "guest", False),
])
def test_a_url_is_read_with_the_defaults_of_its_specification(url, host, port, vhost, username, tls):
    if host is None:
        with pytest.raises(BrokerError, match="names no host"):
            Address.parse(url)
        return
    found = Address.parse(url)
    assert (found.host, found.port, found.vhost, found.username, found.tls) == (host, port, vhost, username, tls)


def test_an_encoded_password_is_decoded():
    assert Address.parse(f"amqp://me:{ENCODED}@here").password.reveal() == PASSWORD


@pytest.mark.parametrize("url", [
    "http://me:hush@here", "me:hush@here", "amqp:me:hush@here", "amqp://me:hush@here:port", "amqp://me:hush@here:99999", "amqp://me:hush@here:0",
    "amqp://me:hush#@here", "amqp://me:hush/@here", "amqp://me:hush@[::1", "amqp://me:hu sh@here", "amqp://me:hush%@here", "amqp://me:hush%zz@here",
    "amqp://me:hush%FF@here", "amqp://me:hush@", "amqp://me:hush@/x", "amqp://me:hush@here/a/b", "amqp://me:12/hush@here", "amqp://me:12?hush@here", "amqp://me:hush@here\n", "amqp://me:[hush@here", "hush", " hush",
])
def test_a_faulty_url_is_refused_without_being_quoted(url):
    with pytest.raises(BrokerError) as caught:
        Address.parse(url)
    told = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    of_ours = told[told.rindex("address.py"):]  # the frame above it is this test's, which holds the URL
    assert "hush" not in of_ours and "hu sh" not in of_ours and caught.value.__context__ is None


@given(st.text())
def test_any_text_is_an_address_or_a_broker_error(text):
    try:
        Address.parse(f"amqp://{text}")
    except BrokerError:
        pass


def test_no_way_of_printing_shows_the_password():
    address = Address.parse("amqp://me:hush@here")
    parameters = address.parameters()
    shown = [repr(address), str(address), f"{address.password}", "%s" % address.password, repr([address.password]), repr(vars(parameters.credentials)),
             repr(parameters), f"{address.password!s:>9}"]
    assert not any("hush" in text for text in shown)
    assert pickle.loads(pickle.dumps(address)).password.reveal() == "hush"
    assert Secret(Secret("hush")).reveal() == "hush"


def test_parameters_take_overrides():
    parameters = Address.parse("amqps://me:hush@here/lab").parameters(heartbeat=0, socket_timeout=1)
    assert (parameters.host, parameters.port, parameters.virtual_host, parameters.heartbeat, parameters.socket_timeout) == ("here", 5671, "lab", 0, 1)
    assert parameters.ssl_options is not None
