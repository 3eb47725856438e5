"""The private line between the supervisor and one worker: frames of JSON with an optional blob, over a socket pair.

A frame is `length of the JSON u32 | length of the blob u32 | JSON | blob`. The blob carries the pickled handler, and
nothing that came from a queue.
"""

import json
import socket
import struct
from typing import Any

_HEAD = struct.Struct("<II")


def encode(frame: dict[str, Any], blob: bytes = b"") -> bytes:
    """Returns one frame as bytes."""
    text = json.dumps(frame).encode()
    return _HEAD.pack(len(text), len(blob)) + text + blob


class Decoder:
    """Turns bytes, as they come, into frames."""

    def __init__(self):
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Takes bytes and returns the (frame, blob) pairs that are complete."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= _HEAD.size:
            text, blob = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + text + blob
            if len(self._buffer) < end:
                break
            frames.append((json.loads(self._buffer[_HEAD.size:_HEAD.size + text]), bytes(self._buffer[_HEAD.size + text:end])))
            del self._buffer[:end]
        return frames


def receive_one(sock: socket.socket) -> dict[str, Any]:
    """Waits for one frame and takes not a byte more, since descriptors may come with the next one."""
    text, blob = _HEAD.unpack(sock.recv(_HEAD.size, socket.MSG_WAITALL))
    return json.loads(sock.recv(text + blob, socket.MSG_WAITALL)[:text])


def receive(sock: socket.socket, decoder: Decoder) -> list[tuple[dict[str, Any], bytes]]:
    """Waits for at least one frame; returns an empty list when the other side is gone."""
    while data := sock.recv(1 << 16):
        if frames := decoder.feed(data):
            return frames
    return []
