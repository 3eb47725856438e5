"""The logical message: its identities, its JSON form on the wire, and the sample messages of the chapters."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.errors import HandlerError, PlanError

#: header that tells which of the published copies this is, 1-based; ours, because the broker owns `x-…`
POSITION_HEADER = "labkit-position"
#: header with the time at which the lab published it, in milliseconds since 1970; the age of a message goes on over its retries
PUBLISHED_HEADER = "labkit-published-ms"
#: header with the retries so far: a list of {attempt, reason, delay_ms}, the earliest first
RETRIES_HEADER = "labkit-retries"
_RETRY = {"attempt": int, "reason": str, "delay_ms": int}
UNREADABLE = "(unreadable)"                           #: stands for the effect key of a message that cannot be read
_MAX_ID_BYTES = 255                                   # what AMQP gives to an id
_encode = json.JSONEncoder(allow_nan=False).encode


class Unreadable(ValueError):
    """Raised when a body is not the JSON of a message."""


@dataclass(frozen=True, slots=True)
class Message:
    """One task, whatever number of times it is delivered.

    effect_key:      the business effect that it asks for, such as "invoice-7:reminder"
    message_id:      the logical message, the same over every attempt; made from the effect key if left out
    sequence_key:    the entity whose order matters, with `sequence_number`; None where order does not matter
    schema:          name and version of the payload
    payload:         JSON values only
    correlation_id:  joins the hops of one business case; the message id if left out
    raw:             sent in place of the JSON, to see what a consumer makes of a body that it cannot read
    """

    effect_key: str
    message_id: str = ""
    sequence_key: str | None = None
    sequence_number: int | None = None
    schema: str = "reminder.v1"
    payload: Mapping[str, Any] = field(default_factory=dict)
    correlation_id: str = ""
    raw: str | None = None

    def __post_init__(self):
        if not isinstance(self.effect_key, str) or not self.effect_key:
            raise PlanError("A message needs an effect_key.", f"it is {self.effect_key!r}, not a text that names the effect",
                            'Write Message("invoice-7:reminder").')
        object.__setattr__(self, "message_id", self.message_id or f"message-for-{self.effect_key}")
        object.__setattr__(self, "correlation_id", self.correlation_id or self.message_id)
        for name in ("effect_key", "message_id", "correlation_id"):
            value = getattr(self, name)
            try:
                size = len(value.encode())
            except (AttributeError, UnicodeEncodeError):
                raise PlanError(f"The {name} is {value!r}.", "it is not a text that can be sent", f'Write {name}="invoice-7", or the like.') from None
            if size > _MAX_ID_BYTES:
                raise PlanError(f"The {name} is longer than {_MAX_ID_BYTES} bytes.", f"it begins with {getattr(self, name)[:40]!r}", "Use a shorter one.")
        if not isinstance(self.raw, str | None):
            raise PlanError(f"The raw body of {self.message_id!r} is {self.raw!r}.", "it is not a text", 'Write raw="{not JSON", or leave it out.')
        try:
            self.body()
        except (TypeError, ValueError) as error:
            raise PlanError(f"The payload of {self.message_id!r} cannot be written as JSON.", str(error),
                            "Use texts, numbers, booleans, None, lists and dictionaries with text keys.") from None

    def body(self) -> bytes:
        """Returns the body, which is JSON unless it is given raw; the ids travel in the AMQP properties."""
        if self.raw is not None:
            return self.raw.encode()
        return _encode({"effect_key": self.effect_key, "sequence_key": self.sequence_key, "sequence_number": self.sequence_number,
                        "schema": self.schema, "payload": dict(self.payload)}).encode()

    @classmethod
    def from_wire(cls, body: bytes, message_id: str | bytes | None, correlation_id: str | bytes | None) -> "Message":
        """Reads a delivered body. Raises Unreadable when it is not the JSON of a message; evaluates nothing."""
        try:
            data = json.loads(body.decode())
            effect_key, payload = data["effect_key"], data.get("payload") or {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:   # ValueError: no UTF-8, no JSON, or a number without end
            raise Unreadable(f"the body is not the JSON of a message: {type(error).__name__}: {error}") from None
        if not isinstance(effect_key, str) or not effect_key or not isinstance(payload, dict):
            raise Unreadable("the body is JSON, but not that of a message: it has no text `effect_key`, or its `payload` is no object")
        message_id, correlation_id = wire_text(message_id) or f"message-for-{effect_key}", wire_text(correlation_id)
        message = object.__new__(cls)                 # whose values came as JSON: they need not be tried as such again
        for name, value in zip(cls.__slots__, (effect_key, message_id, data.get("sequence_key"), data.get("sequence_number"),
                                               data.get("schema", ""), payload, correlation_id or message_id, None)):
            object.__setattr__(message, name, value)
        return message

    @classmethod
    def unreadable(cls, body: bytes, message_id: str | bytes | None) -> "Message":
        """Returns what stands for a body that cannot be read; where it came without an id, the same body is the same message."""
        return cls(UNREADABLE, wire_text(message_id)[:_MAX_ID_BYTES // 4] or f"unreadable-{hashlib.sha256(body).hexdigest()[:16]}")

    @classmethod
    def from_any(cls, body: bytes, message_id: str | bytes | None, correlation_id: str | bytes | None) -> "Message":
        """Reads a delivered body, and takes one that is not the JSON of a message, or that none could be sent with, for "(unreadable)"."""
        try:
            return cls(**cls.from_wire(body, message_id, correlation_id).as_dict())
        except (ValueError, PlanError):
            return cls.unreadable(body, message_id)

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields, for a saved run."""
        return {name: getattr(self, name) for name in self.__slots__} | {"payload": dict(self.payload)}


def wire_text(value: str | bytes | None) -> str:
    """Returns an id as it came from the wire as a text: pika hands out bytes where it is no UTF-8, and None where there is none."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def copy_of(headers: Mapping[str, Any] | None) -> tuple[int | None, int]:
    """Returns which copy of which published message this is: (its position, the attempt that published it again; 0 for the first copy)."""
    headers = headers or {}
    position, retries = headers.get(POSITION_HEADER), retries_of(headers)
    return position if type(position) is int else None, retries[-1]["attempt"] if retries else 0


def retries_of(headers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the retries so far, as the header tells them; none where it is somebody else's, and not in that form."""
    retries = headers.get(RETRIES_HEADER)
    known = isinstance(retries, list) and all(isinstance(retry, dict) and {name: type(value) for name, value in retry.items()} == _RETRY for retry in retries)
    return retries if known else []


def expect(where: str, message: Any) -> None:
    """Raises HandlerError when what was given to `where` is no message."""
    if not isinstance(message, Message):
        raise HandlerError(f"{where} was given {message!r}.", "a Message is expected, and this is none", f'Write {where}(Message("order-1")).')


def reminders(count: int) -> list[Message]:
    """Returns `count` reminders to pay, with effect keys "invoice-1:reminder" and up."""
    return [Message(f"invoice-{n}:reminder", f"reminder-{n}", payload={"invoice": n, "letter": "please pay"})
            for n in range(1, count + 1)]


def shipments(count: int) -> list[Message]:
    """Returns `count` orders to ship, with effect keys "order-1:shipment" and up."""
    return [Message(f"order-{n}:shipment", f"shipment-{n}", schema="shipment.v1", payload={"order": n, "parcels": 1})
            for n in range(1, count + 1)]


def status_events(key: str, numbers: Iterable[int]) -> list[Message]:
    """Returns one numbered status change of the entity `key` for each number, in the given order."""
    return [Message(f"{key}:status-{n}", f"{key}-status-{n}", sequence_key=key, sequence_number=n,
                    schema="status.v1", payload={"number": n}) for n in numbers]
