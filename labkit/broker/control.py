"""The line between a node's starter and its guard: requests and answers, one line of JSON each, told apart by a number."""

import itertools
import json
import socket
import time
from typing import Any

from labkit.errors import BrokerError


class Control:
    """The starter's end. A request that was interrupted leaves nothing behind that the next one would take for its answer."""

    def __init__(self, sock: socket.socket, log: str):
        self._sock, self._log = sock, log
        self._numbers, self._read = itertools.count(1), b""

    def ask(self, request: Any, seconds: float) -> None:
        """Has the guard do something, and waits until it has; raises BrokerError if it could not, or does not answer."""
        number, deadline = next(self._numbers), time.monotonic() + seconds
        try:
            self._sock.settimeout(seconds)
            self._sock.sendall(json.dumps({"number": number, "request": request}).encode() + b"\n")
            answer = {}
            while answer.get("number") != number:
                answer = json.loads(self._line(deadline))
        except (OSError, ValueError):
            raise BrokerError("The guard of the private RabbitMQ node does not answer.", "it was killed, or frozen, from outside, or the node ended by itself",
                              f"release this broker and find another one; the guard's own words are in {self._log}") from None
        if "what" in answer:
            raise BrokerError(answer["what"], answer["why"], answer["now"])

    def close(self) -> None:
        """Leaves the guard to itself; one that has not finished its start ends the node."""
        self._sock.close()

    def _line(self, deadline: float) -> bytes:
        while b"\n" not in self._read:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            self._read += self._sock.recv(1 << 16) or b"\n"  # an end gives an empty line, which is no JSON
        line, _, self._read = self._read.partition(b"\n")
        return line
