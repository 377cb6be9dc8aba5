"""Writes the training metrics of jobs to TensorBoard event files.

Invariants:
- One directory for each job, and one file in it for each run of the daemon; TensorBoard shows them as one curve.
- A record is written whole or not at all: what a full disk has left of one is removed.
- The files are written in a thread. While the disk is slow, the newest values of a job replace those that wait.

The format is small enough to write: records of TFRecord, each an `Event` of protobuf with scalar summaries.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from forged.metrics.messages import JobMetrics
from forged.plugins import Call, ConfigError, PluginContext, Problem, Role, Unavailable

API_VERSION = 1

FILES_MAX = 100
"""Files that are open at a time; the one that was written longest ago is closed, and appended to later."""
MODE = 0o640
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
WALL_TIME, STEP, FILE_VERSION, SUMMARY = 1, 2, 3, 5
"""Fields of `Event`."""
VALUE, TAG, SIMPLE_VALUE = 1, 1, 2
"""Fields of `Summary` and `Summary.Value`."""
CASTAGNOLI = 0x82F63B78
MASK_DELTA = 0xA282EAD8


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    directory: str = ""
    jobs: list[str] = []


def register(context: PluginContext) -> None:
    """Write the metrics of the jobs that the settings name."""
    settings = context.settings(Settings)
    directory = Path(settings.directory) if settings.directory else context.directory()
    if not directory.is_absolute():
        wanted = "an absolute path, because the daemon may run in any directory"
        problem = Problem(f"plugins.{context.name}.directory", str(directory), wanted)
        raise ConfigError("tensorboard_directory", "no event files can be written there", "name another", [problem])
    board = Board(context, settings, EventFiles(directory, context.clock.wall()))
    context.on_signal(JobMetrics, board.take, name="metrics")
    context.command("status", board.status, help="show what was written", needs=Role.VIEWER)
    context.on_stop(board.close)


# The format.


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (CASTAGNOLI if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    """The checksum as TFRecord stores it."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    """A record of TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _with_length(field: int, data: bytes) -> bytes:
    return _key(field, BYTES) + _varint(len(data)) + data


def first_event(at: float) -> bytes:
    """The event that begins each file."""
    return _key(WALL_TIME, FIXED64) + struct.pack("<d", at) + _with_length(FILE_VERSION, b"brain.Event:2")


def event(at: float, step: int, values: Iterable[tuple[str, float]]) -> bytes:
    """An event with scalars."""
    summary = b"".join(_with_length(VALUE, _scalar(tag, value)) for tag, value in values)
    head = _key(WALL_TIME, FIXED64) + struct.pack("<d", at) + _key(STEP, VARINT) + _varint(step)
    return head + _with_length(SUMMARY, summary)


def _scalar(tag: str, value: float) -> bytes:
    return _with_length(TAG, tag.encode()) + _key(SIMPLE_VALUE, FIXED32) + _float32(value)


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def scalars(metrics: JobMetrics) -> Iterator[tuple[str, float]]:
    """What is written of a job: logged values under their names, the rest below `forged/`."""
    yield from metrics.values.items()
    for name in ("steps_per_s", "samples_per_s", "goodput"):
        value = getattr(metrics, name)
        if value is not None:
            yield f"forged/{name}", value


# The files.


class EventFiles:
    """The event files of this run of the daemon. Used by one thread at a time."""

    def __init__(self, directory: Path, began_at: float) -> None:
        self.directory = directory
        self.written = 0
        self._name = f"events.out.tfevents.{int(began_at)}.{socket.gethostname()}.{os.getpid()}.forged"
        self._open: dict[str, int] = {}
        """The descriptors by job, the one that was written longest ago first."""

    def write(self, metrics: JobMetrics) -> None:
        """Append one event; an event that cannot be written whole raises `OSError`."""
        fd = self._opened(metrics.job, metrics.at)
        _append(fd, record(event(metrics.at, metrics.step, scalars(metrics))))
        self.written += 1

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _opened(self, job: str, at: float) -> int:
        fd = self._open.pop(job, None)
        if fd is None:
            if len(self._open) >= FILES_MAX:
                os.close(self._open.pop(next(iter(self._open))))
            # A job's name has no slash and begins with a letter or a digit.
            place = self.directory / job
            place.mkdir(parents=True, exist_ok=True)
            fd = os.open(
                place / self._name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, MODE
            )
            self._open[job] = fd
            if os.fstat(fd).st_size == 0:
                _append(fd, record(first_event(at)))
            return fd
        self._open[job] = fd
        return fd


def _append(fd: int, data: bytes) -> None:
    size = os.fstat(fd).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        os.ftruncate(fd, size)
        raise


class Board:
    """Writes what the daemon tells."""

    def __init__(self, context: PluginContext, settings: Settings, files: EventFiles) -> None:
        self._context = context
        self._jobs = frozenset(settings.jobs)
        self._files = files
        self._problem = ""
        self._turn = asyncio.Lock()

    async def take(self, metrics: JobMetrics, call: Call) -> None:
        """Write the figures of a job."""
        if self._jobs and metrics.job not in self._jobs:
            return
        async with self._turn:
            try:
                await asyncio.to_thread(self._files.write, metrics)
            except OSError as error:
                reason = f"{self._files.directory}: {error.strerror or error}"
                if reason != self._problem:
                    self._context.log.warning("event files cannot be written; values are lost", reason=reason)
                self._problem = reason
                raise Unavailable("tensorboard_failed", reason, "check the file system") from error
        self._problem = ""

    def status(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The directory and counters."""
        return {"directory": str(self._files.directory), "written": self._files.written, "problem": self._problem}

    async def close(self) -> None:
        """Close the files."""
        async with self._turn:
            await asyncio.to_thread(self._files.close)
