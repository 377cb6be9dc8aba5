from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.errors import RequestRefused, Unavailable
from forged.kernel.messages import Gap, Record
from forged.kernel.store.memory import MemoryStore
from plugins import event_log
from plugins.event_log import Files, Line, Mark
from tests.dropins.dropin_fixture import VIEWER, Blob, LoadedPlugin, Rare, refusal, running_plugin
from tests.faulty_store import FaultyStore
from tests.kernel_fixture import Add
from tests.processes.test_full_disk import disk as disk  # a fixture
from tests.small_disk import fill

KILLS = 8

RunPlugin = Callable[..., AbstractAsyncContextManager[LoadedPlugin]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log" / "events.jsonl"


@pytest.fixture
def run_plugin(path: Path, tmp_path: Path) -> RunPlugin:
    def run_plugin(store: FaultyStore | None = None, facts_max: int = 50_000, **given: Any) -> Any:
        chosen = {"path": str(path)} | given
        return running_plugin("event_log", event_log, chosen, tmp_path, store=store, facts_max=facts_max)

    return run_plugin


@pytest.fixture
def refused(path: Path, tmp_path: Path) -> Callable[..., str]:
    return lambda **given: refusal("event_log", event_log, {"path": str(path)} | given, tmp_path)


def lines(first: int, last: int, *, history: str = "h", padding: int = 0) -> Iterator[Line]:
    """Lines for the facts from `first` to `last`."""
    yield from event_log.lines_of(
        history, [Record.of(Blob("x" * padding), fact_id=number, at=1.5) for number in range(first, last + 1)]
    )


def opened(path: Path, *, bytes_max: int = 1 << 30, files_max: int = 5, fsync: bool = False) -> Files:
    return Files(path, bytes_max=bytes_max, files_max=files_max, fsync=fsync)


def write(path: Path, written: Iterator[Line], **given: Any) -> None:
    """Write like a daemon that is then killed."""
    files = opened(path, **given)
    try:
        files.write(written)
    finally:
        files.close()


def all_files(path: Path) -> list[Path]:
    """All files, oldest first."""
    rotated = path.parent.glob(f"{path.name}.*")
    return [*sorted(rotated, key=lambda one: -int(one.suffix[1:])), *([path] if path.exists() else [])]


def entries(path: Path) -> list[dict[str, Any]]:
    """The entries of all files; fails on a partial line."""
    text = b"".join(one.read_bytes() for one in all_files(path))
    assert not text or text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


def lines_in(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def ids(path: Path) -> list[int]:
    return [entry["id"] for entry in entries(path)]


# Lines.


async def test_each_fact_is_a_line_with_history_and_id(run_plugin: RunPlugin, path: Path) -> None:
    async with run_plugin() as plugin:
        expected = await plugin.publish(Blob(b"\x00\xff"), Blob(float("nan")), Blob("two\nlines\u2028"), job="a")
        await plugin.caught_up()
        history = plugin.kernel.store.history
    assert ids(path) == expected
    assert [entry["fact"]["value"] for entry in entries(path)] == ["00ff", None, "two\nlines\u2028"]
    assert {(entry["history"], entry["job"], entry["type"]) for entry in entries(path)} == {(history, "a", "Blob")}


async def test_only_facts_of_the_selected_types_and_jobs_are_written(run_plugin: RunPlugin, path: Path) -> None:
    async with run_plugin(types=["Rare"], jobs=["a"]) as plugin:
        await plugin.publish(Blob(1), Rare(1), job="a")
        await plugin.publish(Rare(2), job="b")
        await plugin.publish(Rare(3), job="a")
        await plugin.caught_up()
    assert [entry["fact"]["number"] for entry in entries(path)] == [1, 3]


async def test_gap_is_written_as_one_line(run_plugin: RunPlugin, path: Path) -> None:
    store = FaultyStore()
    async with run_plugin(store, facts_max=10) as plugin:
        [first] = await plugin.publish(Blob(0))
        await plugin.caught_up()
        await plugin.run("rotate")
        plugin.follower.pause()
        await plugin.publish(*map(Blob, range(30)))
        plugin.follower.resume()
        await plugin.caught_up()
    told = [entry for entry in entries(path) if "gap" in entry]
    assert len(told) == 1
    assert told[0]["gap"]["first"] == first + 1
    place = entries(path).index(told[0])
    assert entries(path)[place + 1]["id"] == told[0]["gap"]["last"] + 1
    assert event_log.read_mark(json.dumps(told[0]).encode()).last == told[0]["gap"]["last"]


async def test_file_is_private_and_by_default_in_the_plugin_directory(run_plugin: RunPlugin, tmp_path: Path) -> None:
    async with run_plugin(path="") as plugin:
        await plugin.publish(Blob(1))
        await plugin.caught_up()
    path = tmp_path / "plugins" / "event_log" / "events.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(ids(path)) == 1


# Exactly once.


async def test_facts_in_the_file_are_not_written_again_after_a_lost_position(run_plugin: RunPlugin, path: Path) -> None:
    store = FaultyStore()
    async with run_plugin(store) as plugin:
        expected = await plugin.publish(*map(Blob, range(20)))
        await plugin.caught_up()
        assert plugin.kernel.ledger.cursors["event_log/facts"] < expected[-1]
    async with run_plugin(store) as plugin:
        expected += await plugin.publish(Blob(20))
        await plugin.caught_up()
    assert ids(path) == expected


@settings(deadline=None)
@given(st.data())
def test_file_truncated_at_any_byte_is_repaired_and_continued(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    write(path, lines(1, 6))
    whole = path.read_bytes()
    kept = data.draw(st.integers(0, len(whole)))
    zeros = data.draw(st.integers(0, 100))
    path.write_bytes(whole[:kept] + bytes(zeros))
    write(path, lines(whole[:kept].count(b"\n") + 1, 6))
    assert path.read_bytes() == whole
    path.write_bytes(whole[:kept])
    write(path, lines(1, 6))
    assert path.read_bytes() == whole


def test_line_damaged_by_a_power_cut_is_rewritten(path: Path) -> None:
    write(path, lines(1, 5))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    start = whole.index(b'{"history":"h","id":4')
    damaged[start + 20 : start + 40] = bytes(20)
    end = whole.index(b"\n", start) + 1
    path.write_bytes(damaged[:end])
    write(path, lines(1, 5))
    assert path.read_bytes() == whole


def test_last_id_is_read_from_the_rotated_file_if_the_current_one_is_missing(path: Path) -> None:
    write(path, lines(1, 5))
    path.rename(path.with_name("events.jsonl.1"))
    write(path, lines(1, 7))
    assert ids(path) == [1, 2, 3, 4, 5, 6, 7]


def test_last_line_of_any_length_is_found(path: Path) -> None:
    write(path, lines(1, 3, padding=300_000))
    write(path, lines(1, 4, padding=300_000))
    assert ids(path) == [1, 2, 3, 4]


def test_equal_ids_of_another_history_are_written(path: Path) -> None:
    write(path, lines(1, 5))
    write(path, lines(3, 6, history="restored"))
    assert ids(path) == [1, 2, 3, 4, 5, 3, 4, 5, 6]


async def test_restored_backup_appends_its_facts(run_plugin: RunPlugin, path: Path) -> None:
    for history in ("one", "two"):
        async with run_plugin(FaultyStore(MemoryStore(history))) as plugin:
            await plugin.publish(Blob(history))
            await plugin.caught_up()
    assert [entry["history"] for entry in entries(path)] == ["one", "two"]


@pytest.mark.parametrize("content", ["a text", "a text\n", "[1]\n", '{"id": 1}\n', '{"history":"h"}\n', '{"a": 1'])
def test_file_that_is_no_event_log_is_not_changed(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(OSError, match="it is not an event log"):
        write(path, lines(1, 1))
    assert path.read_text() == content


WRITER = """
import sys
from itertools import count
from pathlib import Path
from forged.kernel.messages import Record
from plugins.event_log import Files, lines_of
from tests.dropins.dropin_fixture import Blob
files = Files(Path(sys.argv[1]), bytes_max=20_000, files_max=1000, fsync=False)
for start in count(1, 7):
    records = [Record.of(Blob("x" * (number % 300)), fact_id=number, at=1.5) for number in range(start, start + 10)]
    files.write(lines_of("h", records))
    if files.written:
        print(flush=True)
"""


def test_kill_9_at_any_moment_leaves_each_fact_in_the_files_exactly_once(path: Path) -> None:
    """The writer begins anew with fact 1 in each life, and each batch repeats a part of the one before."""
    random = Random(7)
    for _ in range(KILLS):
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(random.randrange(1, 60)):
                assert writer.stdout.readline()
            writer.kill()
            assert writer.wait() == -signal.SIGKILL
    write(path, iter(()))
    assert len(all_files(path)) > 1
    assert ids(path) == list(range(1, len(ids(path)) + 1))


# Rotation.


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=60), st.integers(1, 9), st.integers(2, 6))
def test_files_stay_below_their_limits_and_hold_the_latest_facts_in_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], together: int, files_max: int
) -> None:
    path = tmp_path_factory.mktemp("rotated") / "events.jsonl"
    files = opened(path, bytes_max=2000, files_max=files_max)
    records = [Record.of(Blob("x" * size), fact_id=number, at=1.5) for number, size in enumerate(sizes, 1)]
    for start in range(0, len(records), together):
        files.write(event_log.lines_of("h", records[start : start + together]))
    files.close()
    assert len(all_files(path)) <= files_max
    for one in all_files(path):
        assert one.stat().st_size <= 2000 or one.read_bytes().count(b"\n") == 1
    found = ids(path)
    assert found == list(range(len(sizes) - len(found) + 1, len(sizes) + 1))
    if len(all_files(path)) < files_max:
        assert len(found) == len(sizes)


def test_files_over_a_lowered_limit_are_deleted(path: Path) -> None:
    for number in range(1, 9):
        write(path, lines(number, number, padding=100), bytes_max=100, files_max=8)
    assert len(all_files(path)) == 8
    write(path, lines(9, 9, padding=100), bytes_max=100, files_max=3)
    assert ids(path) == [7, 8, 9]


@pytest.mark.parametrize("survived", range(4))
def test_interrupted_rotation_loses_nothing_and_is_completed(
    path: Path, survived: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 5):
        write(path, lines(number, number, padding=100), bytes_max=100, files_max=6)
    renamed: list[Path] = []
    replace = Path.replace

    def break_off(self: Path, target: Path) -> Path:
        if len(renamed) == survived:
            raise OSError(errno.EIO, "the disk is gone")
        renamed.append(target)
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", break_off)
        for _ in range(3):
            with pytest.raises(OSError, match="the disk is gone"):
                write(path, lines(5, 5, padding=100), bytes_max=100, files_max=6)
    write(path, lines(5, 5, padding=100), bytes_max=100, files_max=6)
    assert ids(path) == [1, 2, 3, 4, 5]


async def test_rotation_under_load_keeps_the_order(run_plugin: RunPlugin, path: Path) -> None:
    async with run_plugin(bytes_max=3000, files_max=1000, batch_max=7) as plugin:
        expected = await plugin.publish(*map(Blob, range(500)))
        await plugin.caught_up()
        assert (await plugin.run("status"))["rotations"] == len(all_files(path)) - 1 > 10
    assert ids(path) == expected


async def test_rotate_command_starts_a_new_file(run_plugin: RunPlugin, path: Path) -> None:
    async with run_plugin() as plugin:
        assert await plugin.run("rotate") == {"rotated": False}
        await plugin.publish(Blob(1))
        await plugin.caught_up()
        assert await plugin.run("rotate") == {"rotated": True}
        await plugin.publish(Blob(2))
        await plugin.caught_up()
        with pytest.raises(RequestRefused, match="viewer"):
            await plugin.run("rotate", VIEWER)
    assert [len(one.read_text().splitlines()) for one in all_files(path)] == [1, 1]


# Changes to the file by other processes.


def test_moved_file_is_replaced_by_a_new_one(path: Path) -> None:
    files = opened(path)
    files.write(lines(1, 3))
    path.rename(path.with_name("events.jsonl-20260501"))
    files.write(lines(1, 5))
    files.close()
    assert ids(path) == [4, 5]


def test_replaced_file_is_appended_to(path: Path) -> None:
    files = opened(path)
    files.write(lines(1, 3))
    path.rename(path.with_name("elsewhere"))
    path.touch(0o640)
    files.write(lines(4, 5))
    files.close()
    assert ids(path) == [4, 5]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_emptied_file_is_written_from_its_beginning(path: Path) -> None:
    files = opened(path)
    files.write(lines(1, 3))
    os.truncate(path, 0)
    files.write(lines(3, 5))
    files.close()
    assert ids(path) == [4, 5]


def test_symbolic_link_in_place_of_the_file_is_not_followed(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "shadow"
    other.write_text("")
    files = opened(path)
    files.write(lines(1, 1))
    path.unlink()
    path.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        files.write(lines(2, 2))
    assert other.read_text() == ""


def test_pipe_in_place_of_the_file_is_refused_without_blocking(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a file"):
        write(path, lines(1, 1))


def test_a_second_writer_is_refused(path: Path) -> None:
    first = opened(path)
    first.write(lines(1, 1))
    with pytest.raises(OSError, match="another process writes to it"):
        write(path, lines(2, 2))
    first.close()
    write(path, lines(2, 2))
    assert ids(path) == [1, 2]


# Settings.


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, partial(os.symlink, "/dev/null")])
def test_path_that_is_no_regular_file_is_refused(
    refused: Callable[..., str], path: Path, make: Callable[[Path], None]
) -> None:
    path.parent.mkdir()
    make(path)
    reason = refused()
    assert "plugins.event_log.path must be " in reason
    assert "a regular file, not a link" in reason


@pytest.mark.parametrize(
    "given", [{"path": "log/events.jsonl"}, {"files_max": 1}, {"bytes_max": 10}, {"fsync": "yes"}, {"colour": "red"}]
)
def test_invalid_setting_is_refused_by_key(refused: Callable[..., str], given: dict[str, Any]) -> None:
    assert f"plugins.event_log.{next(iter(given))}" in refused(**given)


def test_path_below_a_file_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is not one" in refused(path=str(tmp_path / "file" / "events.jsonl"))


def test_checking_the_settings_creates_no_file(refused: Callable[..., str], path: Path) -> None:
    assert refused() == ""
    assert not path.parent.exists()


# Disks that do not do what they should.


def remount(disk: Path, how: str) -> None:
    """Let it be written, or not."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


async def test_full_disk_loses_nothing_and_writing_resumes_with_space(run_plugin: RunPlugin, disk: Path) -> None:
    path = disk / "log" / "events.jsonl"
    async with run_plugin(path=str(path)) as plugin:
        expected = await plugin.publish(Blob(0))
        await plugin.caught_up()
        filler = fill(disk)
        expected += await plugin.publish(*(Blob("x" * 1000) for _ in range(50)))
        assert "No space left on device" in await plugin.stalled()
        assert ids(path) == expected[:1]
        assert plugin.view.state == "active"
        filler.unlink()
        await plugin.caught_up()
        assert plugin.view.failed == 0
    assert ids(path) == expected


async def test_unwritable_directory_is_refused_at_the_start_and_retried_later(
    run_plugin: RunPlugin, refused: Callable[..., str], disk: Path
) -> None:
    path = disk / "log" / "events.jsonl"
    async with run_plugin(path=str(path)) as plugin:
        remount(disk, "ro")
        expected = await plugin.publish(Blob(0))
        assert "Read-only file system" in await plugin.stalled()
        assert "writable by the daemon" in await asyncio.to_thread(refused, path=str(path))
        remount(disk, "rw")
        await plugin.caught_up()
    assert ids(path) == expected


@pytest.mark.parametrize("taken_back", [True, False])
def test_a_write_that_fails_halfway_leaves_no_trace(
    path: Path, taken_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, real, broken = opened(path), os.write, True
    files.write(lines(1, 2))

    def write_some(fd: int, data: bytes) -> int:
        if broken and len(data) < 500:
            raise OSError(errno.ENOSPC, "there is no space left")
        return real(fd, data[:200])

    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "write", write_some)
    with monkeypatch.context() as patch:
        if not taken_back:
            patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(OSError, match="there is no space left"):
            files.write(lines(3, 12))
    if taken_back:
        assert ids(path) == [1, 2]
    broken = False
    files.write(lines(3, 12))
    files.close()
    assert ids(path) == list(range(1, 13))


def test_facts_are_rewritten_after_a_failed_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    files = opened(path, fsync=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse)
        with pytest.raises(OSError, match="the disk is gone"):
            files.write(lines(1, 2))
    assert ids(path) == []
    files.write(lines(1, 2))
    files.close()
    assert ids(path) == [1, 2]


async def test_hanging_disk_does_not_block_the_daemon_and_its_late_write_counts(
    run_plugin: RunPlugin, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, works, real = threading.Event(), threading.Event(), os.write

    def hang(fd: int, data: bytes) -> int:
        hangs.set()
        works.wait()
        return real(fd, data)

    monkeypatch.setattr(event_log, "WAIT_S", 0.01)
    async with run_plugin(types=["Blob"]) as plugin:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", hang)
            expected = await plugin.publish(Blob(1))
            try:
                await asyncio.to_thread(hangs.wait)
                assert "has not finished within" in await plugin.stalled()
                assert await plugin.kernel.bus.ask(Add(2)) == 2
                with pytest.raises(Unavailable, match="has not finished within"):
                    await plugin.run("rotate")
                assert (await plugin.run("status", VIEWER))["waiting_for"]
                expected += await plugin.publish(Blob(2))
            finally:
                works.set()
            await plugin.caught_up()
        assert plugin.view.failed == 0
    assert ids(path) == expected


async def test_status_shows_the_last_written_fact(run_plugin: RunPlugin, path: Path) -> None:
    async with run_plugin() as plugin:
        [_, last] = await plugin.publish(Blob(1), Blob(2))
        await plugin.caught_up()
        said = await plugin.run("status", VIEWER)
    assert said == {
        "path": str(path),
        "bytes": sum(map(len, lines_in(path))),
        "written": 2,
        "rotations": 0,
        "last": last,
        "position": last,
        "behind": 0,
        "waiting_for": None,
    }


def test_position_is_read_only_from_facts_and_gaps() -> None:
    gap = event_log.line_of_gap("h", Gap(3, 9, "because"))
    assert event_log.read_mark(gap.text) == gap.mark == Mark("h", 9)
    for line in (b"", b"{}", b"[]", b'{"history":1,"id":2}', b'{"history":"h","id":"2"}', b'{"history":"h","id":0}'):
        with pytest.raises(ValueError):
            event_log.read_mark(line)
