"""Open an AMQP connection to learn that a broker is ready, and which version it is; or tell apart why that does not work."""

import logging
import socket
import ssl
import time

from labkit.broker.address import Address
from labkit.errors import BrokerError

_RETRY_S = 0.05


def version(address: Address, patience_s: float = 0) -> str:
    """Opens and closes a connection, and returns the version that the broker states, such as "4.3.6".

    patience_s: for how long a refused connection is tried again, for a broker that is starting. Raises BrokerError.
    """
    try:
        import pika
    except ImportError:
        raise BrokerError("The Python package pika is missing.", "this Python is not the one of the lab's environment",
                          "python3 -m labkit up makes it; then use .venv/bin/python") from None
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # what goes wrong is told by our own errors
    deadline = time.monotonic() + patience_s
    while True:
        reason = None
        try:
            connection = pika.BlockingConnection(address.parameters(client_properties={"connection_name": "labkit looks"}))
        except Exception as error:  # pika raises its own, socket's and ssl's, and its frames hold the password
            reason = error
        if reason is None:
            found = connection._impl.server_properties.get("version", "unknown")
            connection.close()
            return found.decode() if isinstance(found, bytes) else found
        if time.monotonic() >= deadline:
            raise told(address, reason)
        time.sleep(_RETRY_S)


def told(address: Address, error: BaseException) -> BrokerError:
    """Returns what pika's error at connecting means, with its likely cause and the next step."""
    return _told(address, _root(error))


def _root(error: BaseException) -> BaseException:
    """Returns the innermost error that pika wrapped."""
    while True:
        inner = getattr(error, "exception", None) or getattr(error, "exceptions", [None])[-1] or (error.args[:1] or [None])[0]
        if not isinstance(inner, BaseException):
            return error
        error = inner


def _told(address: Address, error: BaseException) -> BrokerError:
    from pika import exceptions as pika
    from pika.adapters.utils.connection_workflow import AMQPConnectorException

    where, text = address.where, f"{type(error).__name__} {error}"
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return BrokerError(f"The host {address.host} is not known.", "its name is misspelt, or there is no network", "look at the host in the URL")
    if isinstance(error, ConnectionRefusedError):
        return BrokerError(f"Nobody listens at {where}.", "RabbitMQ is not running there, or the port is wrong",
                           "start it, or look at the port in the URL")
    if isinstance(error, pika.ProbableAuthenticationError) or "ACCESS_REFUSED" in text:
        return BrokerError(f"RabbitMQ at {where} refused the login.", "the user or the password is wrong",
                           "look at both in the URL; special characters in them are percent-encoded")
    if isinstance(error, pika.ProbableAccessDeniedError) or "NOT_ALLOWED" in text:
        return BrokerError(f"RabbitMQ at {where} did not open the virtual host {address.vhost!r}.",
                           "there is none of this name, or the user has no permission in it",
                           "look at the last part of the URL; it is %2F or left out for '/'")
    if isinstance(error, ssl.SSLError):
        return BrokerError(f"RabbitMQ at {where} could not be reached by TLS.",
                           f"it does not speak TLS on this port, or its certificate is not trusted here ({error.reason})",
                           "amqps:// is for TLS, usually on port 5671; amqp:// is without")
    if isinstance(error, (TimeoutError, AMQPConnectorException)) or "Timeout" in text:
        return BrokerError(f"RabbitMQ at {where} did not answer in time.",
                           "it is frozen or overloaded, a firewall is in between, or another program has this port",
                           "try again, or look at host and port in the URL")
    if isinstance(error, (pika.IncompatibleProtocolError, pika.AMQPConnectionError)):
        return BrokerError(f"What listens at {where} does not speak AMQP 0-9-1, or ended the connection.",
                           "another program has this port, or it wants TLS", "look at the port in the URL; amqps:// is for TLS")
    return BrokerError(f"RabbitMQ at {where} could not be reached: {type(error).__name__}.", "the network between here and there",
                       "look at host and port in the URL")
