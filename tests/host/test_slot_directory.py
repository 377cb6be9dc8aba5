"""The slots of several daemons on one host."""

from __future__ import annotations

import asyncio
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from forged.errors import ForgedError, RequestRefused
from forged.host.local_agent import LocalHostAgent
from tests.host.staging import slot_files
from tests.small_disk import small_disk


def test_slots_directory_of_another_user_or_mode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slots").mkdir(mode=0o755)
    (tmp_path / "slots").chmod(0o755)
    agent = LocalHostAgent(str(tmp_path / "slots"), str(tmp_path))

    async def make() -> None:
        await agent.begin("history")
        await agent.make(["0" * 32], 4096)

    with pytest.raises(ForgedError) as error:
        asyncio.run(make())
    assert error.value.code == "slots_directory_invalid"


def test_daemons_that_start_and_stop_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    async def serve(name: str) -> None:
        for _ in range(20):
            agent = LocalHostAgent(str(tmp_path / "slots"), str(tmp_path))
            await agent.begin(name)
            slot_id = name.encode().hex().rjust(32, "0")
            await agent.make([slot_id], 4096)
            await agent.delete([slot_id])
            agent.end()

    with ThreadPoolExecutor(4) as pool:
        for ended in [pool.submit(asyncio.run, serve(name)) for name in "abcd"]:
            ended.result()


async def test_slots_of_a_daemon_that_runs_are_left_alone(tmp_path: Path) -> None:
    """Its data directory may be out of sight, or another daemon may have been restored from its backup."""
    running = LocalHostAgent(str(tmp_path / "slots"), str(tmp_path / "unseen"))
    await running.begin("history")
    await running.make(["0" * 32], 4096)
    await LocalHostAgent(str(tmp_path / "slots"), str(tmp_path)).begin("other")
    restored = LocalHostAgent(str(tmp_path / "slots"), str(tmp_path))
    with pytest.raises(ForgedError) as error:
        await restored.begin("history")
    assert error.value.code == "slots_in_use"
    # Its records, from the same backup, name the slots of the other daemon.
    await restored.delete(["0" * 32])
    assert [path.stem for path in slot_files(tmp_path)] == ["0" * 32]
    running.end()
    await asyncio.to_thread((tmp_path / "unseen").mkdir)
    assert list(await restored.begin("history")) == ["0" * 32]


async def test_slots_of_a_daemon_that_never_comes_back_are_deleted(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("gone", "stopped", "own")]
    for home in homes:
        await asyncio.to_thread(home.mkdir)
        agent = LocalHostAgent(str(tmp_path / "slots"), str(home))
        await agent.begin(home.name)
        await agent.make([home.name.encode().hex().rjust(32, "0")], 4096)
        agent.end()
    await asyncio.to_thread(homes[0].rmdir)
    agent = LocalHostAgent(str(tmp_path / "slots"), str(homes[2]))
    assert list(await agent.begin("own")) == [b"own".hex().rjust(32, "0")]
    assert sorted(path.stem for path in slot_files(tmp_path)) == sorted(
        home.name.encode().hex().rjust(32, "0") for home in homes[1:]
    )
    await agent.delete([b"own".hex().rjust(32, "0")])
    assert len(slot_files(tmp_path)) == 1


async def test_an_eighth_of_the_shared_memory_stays_free(tmp_path: Path) -> None:
    with small_disk(tmp_path / "memory", 8) as memory, ExitStack() as stack:
        agent = LocalHostAgent(str(memory / "slots"), str(tmp_path))
        stack.callback(agent.end)
        await agent.begin("history")
        for size in (4 << 20, (7 << 19) + 4096):
            with pytest.raises(RequestRefused) as refused:
                await agent.make(["0" * 32, "1" * 32], size)
            assert refused.value.code == "slots_full"
        await agent.make(["0" * 32, "1" * 32], 3 << 20)
        assert shutil.disk_usage(memory).free <= 2 << 20, "their memory is reserved"


async def test_file_that_no_daemon_has_made_is_no_slot(tmp_path: Path) -> None:
    agent = LocalHostAgent(str(tmp_path / "slots"), str(tmp_path))
    await agent.begin("history")
    [own] = await agent.make(["0" * 32], 4096)
    planted = await asyncio.to_thread(plant, Path(own).parent, tmp_path / "victims")
    agent.end()
    assert list(await agent.begin("history")) == ["0" * 32]
    for slot_id in planted:
        with pytest.raises((OSError, RequestRefused)):
            await agent.descriptors([slot_id])
    agent.end()


def plant(directory: Path, victims: Path) -> list[str]:
    """Put into the directory of slots what is not a slot; returns the ids by which it would be one."""
    victims.mkdir()
    symbolic, hard, readable, pipe = (directory / f"{digit * 32}.slot" for digit in "1234")
    for link, make in ((symbolic, symbolic.symlink_to), (hard, hard.hardlink_to)):
        victim = victims / link.name
        victim.touch(0o600)
        make(victim)
    readable.touch(0o644)
    os.mkfifo(pipe, 0o600)
    return [path.stem for path in (symbolic, hard, readable, pipe)]
