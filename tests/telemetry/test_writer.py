"""Log lines written to streams that work, block or fail."""

from __future__ import annotations

import fcntl
import io
import os
import threading
from pathlib import Path
from typing import IO

import pytest

from forged.telemetry.writer import (
    BYTES_WAITING_MAX,
    LINES_WAITING_MAX,
    DescriptorWriter,
    LineWriter,
    NoWriter,
    StreamWriter,
    writer_for,
)

PATIENCE_S = 30.0


def loss_line(lines: int, why: str) -> bytes:
    return b"lost %d: %s\n" % (lines, why.encode())


def read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as reader:
        return reader.read()


class Disk:
    """A file that can be full or block writes."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.full = False
        self.tried = threading.Semaphore(0)
        self.open = threading.Event()
        self.open.set()

    def __call__(self, line: bytes) -> None:
        self.tried.release()
        self.open.wait(PATIENCE_S)
        if self.full:
            raise OSError(28, "No space left on device")
        self.lines.append(line)


def test_lines_are_written_in_order_and_the_last_ones_at_the_end() -> None:
    disk = Disk()
    writer = LineWriter(disk, loss_line)
    lines = [b"%d\n" % number for number in range(1000)]
    for line in lines:
        writer.put(line)
    assert writer.close(PATIENCE_S)
    assert disk.lines == lines
    assert writer.lost == 0


def test_lines_lost_on_a_full_disk_are_counted_and_reported_later() -> None:
    disk = Disk()
    disk.full = True
    writer = LineWriter(disk, loss_line)
    for _ in range(3):
        writer.put(b"lost\n")
        assert disk.tried.acquire(timeout=PATIENCE_S)
    disk.full = False
    writer.put(b"kept\n")
    assert writer.close(PATIENCE_S)
    assert writer.lost == 3
    assert disk.lines == [b"kept\n", b"lost 3: writing failed: No space left on device\n"]


def test_logging_does_not_wait_for_a_hanging_writer_and_overflow_is_counted() -> None:
    disk = Disk()
    disk.open.clear()
    writer = LineWriter(disk, loss_line)
    writer.put(b"in the writer's hand\n")
    assert disk.tried.acquire(timeout=PATIENCE_S)
    for _ in range(LINES_WAITING_MAX + 7):
        writer.put(b"line\n")
    assert writer.lost == 7
    disk.open.set()
    assert writer.close(PATIENCE_S)
    assert len(disk.lines) == 1 + LINES_WAITING_MAX + 1
    assert disk.lines[-1].startswith(b"lost 7: ")


def test_queue_is_bounded_in_bytes() -> None:
    disk = Disk()
    disk.open.clear()
    writer = LineWriter(disk, loss_line)
    writer.put(b"x")
    assert disk.tried.acquire(timeout=PATIENCE_S)
    writer.put(b"y" * (BYTES_WAITING_MAX - 1))
    writer.put(b"zz")
    assert writer.lost == 1
    disk.open.set()
    assert writer.close(PATIENCE_S)


def test_lost_line_is_reported_without_another_line() -> None:
    disk = Disk()
    writer = LineWriter(disk, loss_line)
    writer.lose("event cannot be formatted")
    assert disk.tried.acquire(timeout=PATIENCE_S)
    assert writer.close(PATIENCE_S)
    assert disk.lines == [b"lost 1: event cannot be formatted\n"]


def test_close_waits_no_longer_than_its_timeout() -> None:
    disk = Disk()
    disk.open.clear()
    writer = LineWriter(disk, loss_line)
    writer.put(b"x\n")
    assert disk.tried.acquire(timeout=PATIENCE_S)
    assert not writer.close(0.0)
    writer.put(b"too late\n")
    disk.open.set()
    assert writer.close(PATIENCE_S)
    assert disk.lines == [b"x\n"]


def test_unread_pipe_does_not_block_and_keeps_lines_whole() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    sink = DescriptorWriter(writing)
    os.close(writing)
    writer = LineWriter(sink, loss_line)
    sent = LINES_WAITING_MAX * 2
    for number in range(sent):
        writer.put(b"%08d\n" % number)
    assert writer.lost > 0
    lines: list[bytes] = []
    reader = threading.Thread(target=lambda: lines.extend(read_all(reading).splitlines()))
    reader.start()
    assert writer.close(PATIENCE_S)
    sink.close()
    reader.join()
    kept = [line for line in lines if line.isdigit()]
    told = [int(line.split()[1].rstrip(b":")) for line in lines if line.startswith(b"lost ")]
    assert kept == sorted(kept)
    assert len(kept) + len(told) == len(lines)
    assert sum(told) == writer.lost == sent - len(kept)


def test_a_pipe_whose_reader_has_gone_loses_lines_and_nothing_else() -> None:
    reading, writing = os.pipe()
    sink = DescriptorWriter(writing)
    os.close(writing)
    os.close(reading)
    writer = LineWriter(sink, loss_line)
    writer.put(b"x\n")
    assert writer.close(PATIENCE_S)
    assert writer.lost == 1


def test_the_full_device_loses_lines_and_nothing_else() -> None:
    with Path("/dev/full").open("w") as full:
        sink = writer_for(full)
        writer = LineWriter(sink, loss_line)
        writer.put(b"x\n")
        assert writer.close(PATIENCE_S)
    assert writer.lost == 1


def test_nonblocking_descriptor_is_waited_for() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    sink = DescriptorWriter(writing)
    os.close(writing)
    data = b"z" * 100_000
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(read_all(reading)))
    reader.start()
    sink(data)
    sink.close()
    reader.join()
    assert read == [data]


def test_partial_line_does_not_merge_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    written = bytearray()
    room = [4]

    def write(descriptor: int, data: memoryview) -> int:
        taken = min(room[0], len(data))
        if not taken:
            raise OSError(28, "No space left on device")
        room[0] -= taken
        written.extend(data[:taken])
        return taken

    with Path(os.devnull).open("w") as stream:
        sink = DescriptorWriter(stream.fileno())
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space"):
        sink(b"first line\n")
    room[0] = 1000
    sink(b"second line\n")
    sink(b"third line\n")
    sink.close()
    assert bytes(written) == b"firs\nsecond line\nthird line\n"


def test_writer_duplicates_the_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        sink = writer_for(stream)
    sink(b"after\n")
    sink.close()
    assert (tmp_path / "log").read_bytes() == b"after\n"


def test_stream_without_a_descriptor_is_written_to() -> None:
    stream = io.StringIO()
    sink = writer_for(stream)
    sink("é\n".encode())
    assert isinstance(sink, StreamWriter)
    assert stream.getvalue() == "é\n"


def closed() -> IO[str]:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed()])
def test_lines_without_a_stream_are_counted_as_lost(stream: IO[str] | None) -> None:
    sink = writer_for(stream)  # type: ignore[arg-type]
    assert isinstance(sink, NoWriter)
    writer = LineWriter(sink, loss_line)
    writer.put(b"x\n")
    assert writer.close(PATIENCE_S)
    assert writer.lost == 1
