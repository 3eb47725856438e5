"""The trace: what happened, as plain data. A worker writes it to mapped memory; the supervisor reads it while it grows.

Writing costs a copy into a mapped file, no system call, and what was written survives a SIGKILL of the writer. A record
is `length u32 | time u64 ns | name u16 | phase u8 | delivery u32 | detail, marshalled or empty`; its length is stored last, so
that a record cut short by the kill is not there. Records do not straddle pages of CHUNK bytes. What a step's first record tells is not written again after
the step: the reader adds it. The detail is in Python's own format, which is ten times faster than JSON: both ends are the
same Python, and the file is the worker's own.
"""

import json
import marshal
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from labkit import sql
from labkit.steps import AFTER, BEFORE, FAILED, LEDGER_BEGIN, LEDGER_COMMIT, LEDGER_EXECUTE, LEDGER_ROLLBACK, NAMES, PHASES

CHUNK = 1 << 18                                       # a multiple of every system's page size
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<QHBI")
_NEXT_CHUNK = 0xFFFFFFFF
_NAME_CODE = {name: code for code, name in enumerate(NAMES)}
_PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}
_TURNS = (LEDGER_BEGIN, LEDGER_COMMIT, LEDGER_ROLLBACK)
_MAX_DETAIL = 4096
_MAX_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    at_ms:      milliseconds since the run began
    lane:       "broker", "supervisor" or "worker 1" and up
    name:       a step of `steps.STEPS`, or a note of `steps.NOTES`
    phase:      "before", "after" or "failed" for a step, "note" for the rest
    message_id, effect_key, position, attempt, tag: of the delivery or message, None where there is none;
                position is the 1-based place among the published messages
    detail:     JSON values, such as {"outcome": "duplicate"}
    """

    at_ms: float
    lane: str
    name: str
    phase: str
    message_id: str | None = None
    effect_key: str | None = None
    position: int | None = None
    attempt: int | None = None
    tag: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def turn(self) -> str | None:
        """What it does to the transaction of its worker: begins, commits or undoes it, by that step or by a statement of one's own; or None."""
        if self.phase != AFTER or self.name != LEDGER_EXECUTE:
            return self.name if self.phase == AFTER and self.name in _TURNS else None
        statement = str(self.detail.get("statement"))
        if sql.BEGINS.match(statement):
            return LEDGER_BEGIN
        ends = sql.ENDS.match(statement)
        return ends and (LEDGER_COMMIT if ends[2].upper() in ("COMMIT", "END") else LEDGER_ROLLBACK)


class Writer:
    """Appends records to an open, empty file that the reader holds too."""

    def __init__(self, fd: int):
        self._fd, self._end = fd, 0
        self._next_chunk()

    def write(self, name: str, phase: str, delivery: int, detail: dict[str, Any]) -> None:
        """Stores one record; `delivery` is the number of the delivery within this worker, 0 for none."""
        record = _HEAD.pack(time.monotonic_ns(), _NAME_CODE[name], _PHASE_CODE[phase], delivery)
        if detail:
            record += _detail_bytes(detail)
        if self._at + 4 + len(record) + 4 > CHUNK:    # 4 more for the mark that sends the reader on
            _LENGTH.pack_into(self._map, self._at, _NEXT_CHUNK)
            self._next_chunk()
        at = self._at
        self._at = end = at + 4 + len(record)
        self._map[at + 4:end] = record
        _LENGTH.pack_into(self._map, at, end - at - 4)

    def _next_chunk(self) -> None:
        os.ftruncate(self._fd, self._end + CHUNK)
        self._map = mmap.mmap(self._fd, CHUNK, offset=self._end)
        self._end, self._at = self._end + CHUNK, 0


class Reader:
    """Reads records in order, as far as they are written; may be asked again."""

    def __init__(self, fd: int):
        self._fd, self._start, self._at, self._map = fd, 0, 0, None
        self._told: dict[str, dict[str, Any]] = {}    # step under way -> the detail of its first record

    def read(self) -> Iterator[tuple[int, str, str, int, dict[str, Any]]]:
        """Yields (time in ns, name, phase, delivery number, detail) of each record that was not read yet."""
        while self._mapped():
            size, = _LENGTH.unpack_from(self._map, self._at)
            if size == 0:
                return
            if size == _NEXT_CHUNK:
                self._start, self._at, self._map = self._start + CHUNK, 0, None
                continue
            ns, code, phase_code, delivery = _HEAD.unpack_from(self._map, self._at + 4)
            tail = self._map[self._at + 4 + _HEAD.size:self._at + 4 + size]
            self._at += 4 + size
            name, phase, detail = NAMES[code], PHASES[phase_code], marshal.loads(tail) if tail else {}
            if phase == BEFORE:
                self._told[name] = detail
            elif phase in (AFTER, FAILED):
                detail = self._told.pop(name, {}) | detail
            yield ns, name, phase, delivery, detail

    def _mapped(self) -> bool:
        if self._map is None and os.fstat(self._fd).st_size >= self._start + CHUNK:
            self._map = mmap.mmap(self._fd, CHUNK, offset=self._start, access=mmap.ACCESS_READ)
        return self._map is not None


def _detail_bytes(detail: dict[str, Any]) -> bytes:
    try:
        tail = marshal.dumps(detail)
    except ValueError:                                # a value of some class
        tail = marshal.dumps(json.loads(json.dumps(detail, default=str)))
    return tail if len(tail) <= _MAX_DETAIL else marshal.dumps({name: _cut(value) for name, value in detail.items()})


def _cut(value: Any) -> Any:
    return value[:_MAX_TEXT] + "…" if isinstance(value, str) and len(value) > _MAX_TEXT else value
