"""`forgectl memory` against a real daemon."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from forged.cli.forgectl import candidates, main
from forged.cli.process import EXIT_FAILED, EXIT_REFUSED
from forged.memory.model import PlannedBlock
from tests.cli.memory.conftest import GPU, INCARNATION, JOB, KIB, TOTAL, MemoryCommands


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line.strip())


def fields(lines: list[str]) -> dict[str, str]:
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in lines)


def test_devices_are_listed_with_how_full_they_are(commands: MemoryCommands) -> None:
    commands.allocate("a", 16 * KIB)
    commands.allocate("b", 8 * KIB, cached=True)
    for line in ("", "devices", f"devices --job {JOB}"):
        header, row = commands.lines(line)
        shown = dict(zip(cells(header), cells(row), strict=True))
        assert (shown["device"], shown["total"], shown["held"]) == (GPU, "64.0 KiB", "16.0 KiB")
        assert (shown["cached"], shown["pressure"], shown["out of memory"]) == ("8.00 KiB", "25.0%", "not soon")
    [device] = commands.json("devices")["devices"]
    assert device["stats"]["allocated_bytes"] == 24 * KIB


def test_statistics_and_forecasts_are_shown_for_each_device(commands: MemoryCommands) -> None:
    commands.allocate("a", 16 * KIB)
    header, row = commands.lines("stats")
    assert dict(zip(cells(header), cells(row), strict=True))["allocations"] == "1"
    [stats] = commands.json("stats")["devices"]
    assert set(stats) == {"job", "name", "stats"}
    assert stats["stats"]["largest_free_block"] == 48 * KIB
    header, row = commands.lines("forecast")
    assert dict(zip(cells(header), cells(row), strict=True))["obtainable"] == "48.0 KiB"
    [forecast] = commands.json(f"forecast --job {JOB}")["devices"]
    assert set(forecast) == {"job", "name", "pressure", "forecast"}


def test_blocks_of_a_device_are_listed_by_offset(commands: MemoryCommands) -> None:
    for name in "abc":
        commands.allocate(name, 8 * KIB)
    header, *rows = commands.lines(f"ls {GPU} --job {JOB}")
    assert [cells(row)[0] for row in rows] == ["0", f"{8 * KIB}", f"{16 * KIB}"]
    first = dict(zip(cells(header), cells(rows[0]), strict=True))
    assert (first["tensor"], first["worker"], first["name"], first["status"]) == ("tensor a", "w0", "a", "allocated")
    assert len(commands.json(f"ls {GPU} --job {JOB}")["blocks"]) == 3
    assert commands.json(f"ls {GPU} --job {JOB} --free")["blocks"][-1]["block"]["size"] == TOTAL - 24 * KIB


def test_long_list_of_blocks_is_whole(commands: MemoryCommands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forged.memory.book.questions.take_page", lambda entries, limit: _page_of_two(entries))
    for name in "abcde":
        commands.allocate(name, 8 * KIB)
    listed = commands.json(f"ls {GPU} --job {JOB}")["blocks"]
    assert [one["handle"][0] for one in listed] == list("abcde")


def _page_of_two(entries: Iterable[Any]) -> tuple[list[Any], bool]:
    found = list(entries)
    return found[:2], len(found) > 2


def test_device_is_shown_with_its_forecast_and_its_blocks(commands: MemoryCommands, tmp_path: Path) -> None:
    commands.allocate("a", 16 * KIB)
    picture = tmp_path / "device.png"
    lines = commands.lines(f"show {GPU} --job {JOB} --picture '{picture}'")
    end = lines.index("")
    shown = fields(lines[:end])
    assert (shown["device"], shown["compute capability"], shown["allocated"]) == (GPU, "8.6", "16.0 KiB")
    assert (shown["out of memory"], shown["eviction"]) == ("not soon", "lru")
    assert "64.0 KiB" in "".join(lines[end:])
    assert picture.read_bytes().startswith(b"\x89PNG")
    reply = commands.json(f"show {GPU} --job {JOB}")
    assert reply["device"]["name"] == GPU
    assert [one["block"]["status"] for one in reply["blocks"]] == ["allocated", "free"]


def test_offsets_of_a_planned_trace_are_served(commands: MemoryCommands, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("id,lower,upper,size\nweights,0,9,16000\nactivations,1,5,20000\ngradients,3,8,10000\n")
    planned = commands.json(f"plan '{trace}' --alignment 256")
    blocks = [PlannedBlock(str(one["id"]), one["offset"], one["size"]) for one in planned["offsets"]]
    commands.client.plan_offsets(JOB, "w0", INCARNATION, GPU, blocks)
    commands.allocate("other", 256)
    for block in blocks:
        commands.allocate(block.name, block.size)
    listed = {one["handle"][0]: one["block"]["offset"] for one in commands.json(f"ls {GPU} --job {JOB}")["blocks"]}
    assert {block.name: listed[block.name] for block in blocks} == {block.name: block.offset for block in blocks}
    assert listed["other"] >= planned["height"]
    lines = commands.lines(f"show {GPU} --job {JOB}")
    assert fields(lines[: lines.index("")])["planned offsets"] == "3 blocks, up to 45.3 KiB; 3 placed, 0 missed"
    assert commands.json(f"show {GPU} --job {JOB}")["device"]["offset_plan"]["placed"] == 3


def test_unknown_device_and_job_are_refused(commands: MemoryCommands) -> None:
    for line in (f"ls w9/gpu0 --job {JOB}", f"show w9/gpu0 --job {JOB}", "fit 1KiB --job no", "devices --job no"):
        code, out, err = commands.run(line)
        assert (code, out) == (EXIT_REFUSED, "")
        assert "forgectl: " in err


def test_place_of_a_block_is_found_with_what_gives_way(commands: MemoryCommands) -> None:
    commands.allocate("a", 32 * KIB)
    commands.allocate("b", 24 * KIB, cached=True)
    header, row = commands.lines(f"fit 8KiB --job {JOB}")
    assert dict(zip(cells(header), cells(row), strict=True))["evicted"] == "0 B"
    [place] = commands.json(f"fit 16KiB --job {JOB}")["places"]
    assert (place["device"], place["evicted_bytes"]) == (GPU, 24 * KIB)
    code, out, _ = commands.run(f"fit 1GiB --job {JOB}")
    assert (code, out) == (EXIT_FAILED, f"no device of job {JOB} can make room for 1.00 GiB\n")


def test_devices_are_completed(commands: MemoryCommands) -> None:
    words = ["--socket", commands.daemon.socket, "memory", "show", "--job", JOB, "w0"]
    assert candidates.candidates(main._parser(), words) == [(GPU, JOB)]
