"""Where a broker is and how to log in, in a form that never shows its password: not in a repr, an error or a traceback."""

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from labkit.errors import BrokerError

_FORM = "write it as amqp://USER:PASSWORD@HOST:PORT/VHOST, with every special character of a part percent-encoded"


class Secret(str):
    """A text that shows itself as '***'; `reveal()` gives it. Also safe where a debugger prints local variables."""

    def __new__(cls, text: str) -> "Secret":
        return text if isinstance(text, Secret) else super().__new__(cls, text)

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return format("***", spec)

    def reveal(self) -> str:
        """Returns the text itself."""
        return str.__str__(self)


@dataclass(frozen=True, repr=False)
class Address:
    """A broker's address and login. `repr` and `str` tell where it is, and neither the password nor the user."""

    host: str
    port: int = 5672
    vhost: str = "/"
    username: str = "guest"
    password: Secret = Secret("guest")
    tls: bool = False

    def __post_init__(self):
        object.__setattr__(self, "password", Secret(self.password))

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Reads an amqp:// or amqps:// URL, with the defaults of its specification; options after a `?` are not used.

        Raises BrokerError, which names the faulty part and never quotes the URL.
        """
        url = Secret(url)  # from here on no frame holds it in the open
        found = _read(url)
        if isinstance(found, str):
            raise BrokerError("The broker's URL cannot be read.", found, _FORM)
        return cls(*found)

    def __str__(self) -> str:
        return self.where + (f", virtual host {self.vhost!r}" if self.vhost != "/" else "")

    def __repr__(self) -> str:
        return f"<Address {self}{', TLS' if self.tls else ''}>"

    @property
    def where(self) -> str:
        """The host and the port, as people write them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def parameters(self, **overrides: Any):
        """Returns `pika.ConnectionParameters`: one attempt, ten seconds at most, unless `overrides` say otherwise."""
        import pika

        values = dict(host=self.host, port=self.port, virtual_host=self.vhost, connection_attempts=1, socket_timeout=5, stack_timeout=10,
                      credentials=pika.PlainCredentials(self.username, self.password))
        if self.tls:
            import ssl
            values["ssl_options"] = pika.SSLOptions(ssl.create_default_context(), self.host)
        return pika.ConnectionParameters(**{**values, **overrides})


def _read(url: Secret) -> tuple | str:
    """Returns the parts of the URL, or what is wrong with it: an error that is raised here would hold them in its frame."""
    try:
        parts = urlsplit(url.reveal())
        scheme, host, port, path = parts.scheme, parts.hostname, parts.port, parts.path
        username, password = parts.username, parts.password
    except ValueError:
        return "its host or its port is malformed; a special character in the user or the password does that too"
    if scheme not in ("amqp", "amqps"):
        return "it begins neither with amqp:// nor with amqps://"
    if parts.fragment or "#" in url.reveal():
        return "it holds a bare '#', which is written %23"
    if re.search(r"[\s\x00-\x1f\x7f]", url.reveal()) or re.search(r"%(?![0-9A-Fa-f]{2})", url.reveal()):
        return "it holds a space, a control character, or a '%' that does not begin an encoded character"
    if "@" in path + parts.query:
        return "a '/' or a '?' in its user or its password is bare; they are written %2F and %3F"
    if not host:
        return "it names no host"
    if port == 0:
        return "port 0 is none"
    if "/" in path[1:]:
        return "its virtual host holds a bare '/', which is written %2F"
    try:
        username, password, vhost = (unquote(part, errors="strict") for part in (username or "", password or "", path[1:]))
        host = unquote(host, errors="strict")
    except UnicodeDecodeError:
        return "an encoded character in it is not UTF-8"
    if not parts.username:
        username, password = "guest", password or "guest"
    tls = scheme == "amqps"
    return host, port or (5671 if tls else 5672), vhost or "/", username, Secret(password), tls
