"""The provider as a handler sees it: `shop.provider`. A call is one HTTP request on a connection of its own, and one step."""

import io
import json
from collections.abc import Callable
from typing import Any

from labkit import steps
from labkit.access import text
from labkit.errors import HandlerError
from labkit.provider import RUN_HEADER

_LONGEST_S = 86400


class Client:
    """Charges customers at the provider."""

    def __init__(self, gate: steps.Gate, current_delivery: Callable[[], Any], ask: Callable[..., dict[str, Any]]):
        """ask() returns where the provider is, as {"port": …, "run": …}; ask(refused=key) tells that nobody listened there."""
        self._gate, self._delivery, self._ask = gate, current_delivery, ask
        self._where: dict[str, Any] | None = None

    def charge(self, effect_key: str, *, timeout_s: float = 1.0, **detail: Any) -> dict[str, Any]:
        """Charges a customer, and returns the provider's answer: what was sent, and the "charge" that it made. Nothing stands against a second one.

        timeout_s: how long the provider may be silent
        detail:    JSON values that are sent along, such as amount=20
        Raises what Python's own library raises: urllib.error.HTTPError for an answer such as 429 or 500, with its `code` and its
        `headers`, ConnectionRefusedError when nobody listens, ConnectionError when the connection ends, and TimeoutError when no
        answer came in time. After a timeout nothing is known: the charge may have been made, or not, or it is made later.
        """
        delivery = self._delivery()
        is_its_own = text("effect_key", effect_key) == (delivery and delivery.message.effect_key)
        body = _encoded({**detail, "effect_key": effect_key})
        if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool) or not 0 < timeout_s < _LONGEST_S:
            raise HandlerError(f"timeout_s is {timeout_s!r}.", "it is a number of seconds", "Leave it out, or write timeout_s=1.0.")
        with self._gate.step(steps.PROVIDER_CHARGE, delivery, **({} if is_its_own else {"effect_key": effect_key})) as passage:
            answer = self._post(effect_key, body, timeout_s)
            passage.outcome = answer["charge"]
        return answer

    def _post(self, effect_key: str, body: bytes, timeout_s: float) -> dict[str, Any]:
        import http.client                            # here, since most runs call nobody
        import urllib.error
        if self._where is None:
            self._where = self._ask()
        connection = http.client.HTTPConnection("127.0.0.1", self._where["port"], timeout=timeout_s)
        try:
            connection.request("POST", "/charges", body, {"Content-Type": "application/json", RUN_HEADER: self._where["run"]})
            response = connection.getresponse()
            answer = response.read()
        except ConnectionRefusedError as error:
            self._ask(refused=effect_key)
            raise ConnectionRefusedError("nobody listens at the provider") from error                         # the system's words have its own number in them
        except http.client.IncompleteRead as error:
            raise ConnectionResetError("the connection ended in the middle of the answer") from error
        finally:
            connection.close()
        if response.status >= 400:
            raise urllib.error.HTTPError(f"http://127.0.0.1:{self._where['port']}/charges", response.status, response.reason, response.headers, io.BytesIO(answer))
        return json.loads(answer)


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body).encode()
    except (TypeError, ValueError) as error:
        raise HandlerError("The charge's detail cannot be sent.", f"it is no JSON: {error}", "Send texts, numbers, lists and dictionaries.") from None
