"""TensorBoard event files, read back by the format's definition."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from forged.kernel.messages import Call
from forged.metrics.messages import JobMetrics
from plugins import tensorboard
from plugins.tensorboard import EventFiles, crc32c, event, masked
from tests.dropins.dropin_fixture import VIEWER, LoadedPlugin, refusal, running_plugin

JOB = "run"
# What the package tensorboard makes of an event: step 7, wall time 2.5, tag "loss", value 0.5.
OFFICIAL = bytes.fromhex("09000000000000044010072a0d0a0b0a046c6f7373150000003f")


def figures(step: int, job: str = JOB, **values: float) -> JobMetrics:
    return JobMetrics(job, 1_000.0 + step, step, values, 4.0, None, 0.9)


def records(data: bytes) -> list[bytes]:
    """The records of a file, whose checksums are right."""
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + length]
        assert data[8:12] == masked(data[:8])
        assert data[12 + length : 16 + length] == masked(body)
        found.append(body)
        data = data[16 + length :]
    return found


async def taken(plugin: LoadedPlugin, *told: JobMetrics) -> dict[str, Any]:
    """Signal these figures, and wait until as many as expected are written."""
    for one in told:
        before = (await plugin.run("status", VIEWER))["written"]
        plugin.kernel.bus.signal(one, Call(VIEWER, "a test"))
        while (await plugin.run("status", VIEWER))["written"] == before:
            pass
    status: dict[str, Any] = await plugin.run("status", VIEWER)
    return status


@pytest.mark.parametrize(("data", "crc"), [(b"123456789", 0xE3069283), (b"", 0), (b"\0" * 32, 0x8A9136AA)])
def test_checksum_is_that_of_castagnoli(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


def test_event_has_the_bytes_that_tensorboard_writes() -> None:
    assert event(2.5, 7, [("loss", 0.5)]) == OFFICIAL


@pytest.mark.parametrize("value", [1e300, -1e300, float("nan"), float("inf")])
def test_value_that_single_precision_lacks_is_written_all_the_same(value: float) -> None:
    assert event(2.5, 7, [("loss", value)])[:-4] == OFFICIAL[:-4]


async def test_figures_of_a_job_are_in_its_directory(tmp_path: Path) -> None:
    settings = {"directory": str(tmp_path / "board")}
    async with running_plugin("tensorboard", tensorboard, settings, tmp_path) as plugin:
        status = await taken(plugin, figures(1, loss=0.5), figures(2, loss=0.25), figures(1, "other", loss=1.0))
    assert (status["written"], status["problem"]) == (3, "")
    [file] = (tmp_path / "board" / JOB).iterdir()
    first, *events = records(file.read_bytes())
    assert b"brain.Event:2" in first
    goodput = [("forged/steps_per_s", 4.0), ("forged/goodput", 0.9)]
    assert events == [
        event(1_001.0, 1, [("loss", 0.5), *goodput]),
        event(1_002.0, 2, [("loss", 0.25), *goodput]),
    ]


async def test_other_jobs_than_the_settings_name_are_not_written(tmp_path: Path) -> None:
    settings = {"directory": str(tmp_path / "board"), "jobs": [JOB]}
    async with running_plugin("tensorboard", tensorboard, settings, tmp_path) as plugin:
        plugin.kernel.bus.signal(figures(1, "other", loss=1.0), Call(VIEWER, "a test"))
        await taken(plugin, figures(1, loss=0.5))
    assert [place.name for place in (tmp_path / "board").iterdir()] == [JOB]


def test_files_beyond_the_limit_are_closed_and_appended_to_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "FILES_MAX", 2)
    files = EventFiles(tmp_path, 5.0)
    for step in range(3):
        for job in ("a", "b", "c"):
            files.write(figures(step, job, loss=1.0))
    assert len(files._open) == 2
    files.close()
    for job in ("a", "b", "c"):
        [file] = (tmp_path / job).iterdir()
        assert len(records(file.read_bytes())) == 4


def test_part_of_a_record_is_removed_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = EventFiles(tmp_path, 5.0)
    files.write(figures(1, loss=1.0))
    write = os.write

    def until_full(fd: int, data: Any) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:30])

    monkeypatch.setattr(os, "write", until_full)
    with pytest.raises(OSError, match="No space"):
        files.write(figures(2, loss=1.0))
    monkeypatch.undo()
    files.write(figures(3, loss=1.0))
    files.close()
    [file] = (tmp_path / JOB).iterdir()
    assert len(records(file.read_bytes())) == 3


def test_relative_directory_is_refused(tmp_path: Path) -> None:
    assert "absolute" in refusal("tensorboard", tensorboard, {"directory": "board"}, tmp_path)
