from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forged import checkpoint
from forged.catalog.files import stored_files
from forged.catalog.files.stored_files import HUNG_MAX, StoredCheckpointFiles
from forged.catalog.ports import FOLDER_MISSING, STORAGE_HANGS, CheckpointLocation, FoundCheckpoint
from forged.checkpoint.format.manifest import SUFFIX, TOMBSTONE
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.locations import storage_at
from forged.errors import ForgedError, Unavailable
from tests.checkpoint.fixtures.swapped_links import contents_of, swapped


def saved(path: Path | str, value: float = 1.0) -> CheckpointLocation:
    """Where a new checkpoint is."""
    checkpoint.save(str(path), {"w": np.full(5000, value, np.float32)})
    return CheckpointLocation(str(path), listing.read_manifest(*storage_at(path)).save_id, None)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def no_progress(done_bytes: int, total_bytes: int) -> None:
    return


async def code_of(called: Any) -> str:
    with pytest.raises(ForgedError) as error:
        await called
    return error.value.code


async def test_whole_checkpoint_is_found_with_its_size(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), saved(tmp_path / "a")
    size = listing.read_manifest(*storage_at(at.path)).size_bytes
    assert await files.find(at) == FoundCheckpoint(size, "")
    assert await files.find(CheckpointLocation(at.path, "00000000", None)) is None
    assert await files.find(CheckpointLocation(at.path, at.save_id, "another job")) is None
    assert await files.find(CheckpointLocation(str(tmp_path / "b"), at.save_id, None)) is None


async def test_checkpoint_without_a_file_is_not_found(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), saved(tmp_path / "a")
    next((tmp_path / "a").iterdir()).unlink()
    assert await files.find(at) is None


async def test_deleted_checkpoint_leaves_no_file(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), saved(tmp_path / "a")
    other = saved(tmp_path / "b")
    (tmp_path / "a" / f"{at.save_id}.00007.receipt").write_bytes(b"x")
    kept = {name for name in files_in(tmp_path) if not name.startswith("a")}
    await files.delete(at)
    await files.delete(at)
    assert files_in(tmp_path) == kept
    assert await files.find(other) is not None


async def test_interrupted_deletion_is_finished(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), saved(tmp_path / "a")
    (tmp_path / f"a{SUFFIX}").rename(tmp_path / f"a{TOMBSTONE}")
    assert await files.find(at) is None
    await files.delete(at)
    assert files_in(tmp_path) == set()


async def test_left_files_of_an_unfinished_save_are_deleted_and_those_of_others_stay(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), saved(tmp_path / "a")
    left = "0123abcd"
    for name in (f"{left}.00000-of-00002.safetensors", f"{left}.00001.receipt", "notes.txt", f"{left}x.receipt"):
        (tmp_path / "a" / name).write_bytes(b"x")
    whole = files_in(tmp_path)
    await files.delete(CheckpointLocation(at.path, left, "run"))
    assert whole - files_in(tmp_path) == {f"a/{left}.00000-of-00002.safetensors", f"a/{left}.00001.receipt"}
    assert await files.find(at) is not None


async def test_checkpoint_of_another_job_or_save_is_not_touched(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), saved(tmp_path / "a")
    before = files_in(tmp_path)
    await files.delete(CheckpointLocation(at.path, at.save_id, "another job"))
    await files.delete(CheckpointLocation(at.path, "ffffffff", None))
    assert files_in(tmp_path) == before


async def test_unreadable_manifest_is_not_deleted(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), saved(tmp_path / "a")
    (tmp_path / f"a{SUFFIX}").write_bytes(b"{}")
    before = files_in(tmp_path)
    assert await code_of(files.delete(at)) == "checkpoint_manifest_corrupt"
    assert files_in(tmp_path) == before


async def test_checkpoint_that_is_read_is_deleted_later(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), saved(tmp_path / "a")
    storage, prefix = storage_at(at.path)
    from forged.checkpoint.ports import hold

    with hold(storage, prefix + SUFFIX):
        assert await code_of(files.delete(at)) == "checkpoint_being_read"
    await files.delete(at)
    assert files_in(tmp_path) == set()


async def test_missing_folder_is_no_checkpoint_that_was_deleted(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), CheckpointLocation(str(tmp_path / "gone" / "a"), "00000000", None)
    for call in (files.find(at), files.delete(at), files.verify(at, 1 << 30, no_progress)):
        assert await code_of(call) == FOLDER_MISSING


async def test_empty_folder_is_no_damage(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), CheckpointLocation(str(tmp_path / "a"), "00000000", None)
    assert await code_of(files.verify(at, 1 << 30, no_progress)) == FOLDER_MISSING


async def test_verification_finds_damage(tmp_path: Path) -> None:
    files, at, seen = StoredCheckpointFiles(), saved(tmp_path / "a"), list[int]()
    saved(tmp_path / "b", 2.0)
    assert await files.verify(at, 1 << 30, lambda done, total: seen.append(done)) == ""
    assert seen[-1] == 20_000
    (part,) = (tmp_path / "a").iterdir()
    damaged = bytearray(part.read_bytes())
    damaged[-1] ^= 1
    part.write_bytes(damaged)
    assert "w" in await files.verify(at, 1 << 30, no_progress)
    part.unlink()
    assert await files.verify(at, 1 << 30, no_progress)
    (tmp_path / f"a{SUFFIX}").unlink()
    assert await files.verify(at, 1 << 30, no_progress) == "its manifest is missing"


def flip(path: Path, *places: int) -> None:
    """Damage a byte of a file."""
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 1
    path.write_bytes(data)


async def test_damage_is_repaired_from_a_copy_in_another_checkpoint(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), saved(tmp_path / "a")
    saved(tmp_path / "b")
    (part,) = (tmp_path / "a").iterdir()
    before = part.read_bytes()
    flip(part, -1, -20_000)
    assert await files.repair(at)
    assert part.read_bytes() == before
    assert not await files.repair(at)
    assert await files.verify(at, 1 << 40, no_progress) == ""
    assert len(files_in(tmp_path / "a")) == 1


async def test_damage_without_a_copy_stays_as_it_is(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), saved(tmp_path / "a")
    saved(tmp_path / "b", 2.0)
    (part,) = (tmp_path / "a").iterdir()
    flip(part, -1)
    before = part.read_bytes()
    assert await code_of(files.repair(at)) == "checkpoint_chunk_corrupt"
    assert part.read_bytes() == before
    assert len(files_in(tmp_path / "a")) == 1
    part.write_bytes(before[:-1])
    assert await code_of(files.repair(at)) == "checkpoint_file_size"


async def test_verification_reads_at_the_given_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    monkeypatch.setattr("forged.checkpoint.ports.CancelToken.wait", lambda self, seconds: waits.append(seconds))
    assert await StoredCheckpointFiles().verify(saved(tmp_path / "a"), 10_000, no_progress) == ""
    # The headers are read besides.
    assert 2.0 <= sum(waits) < 3.0


async def test_link_that_leads_out_of_the_root_is_not_followed(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    (root / "run").mkdir(parents=True)
    at = saved(outside / "a")
    (root / "run" / "linked").symlink_to(outside)
    before = files_in(outside)
    through = CheckpointLocation(str(root / "run" / "linked" / "a"), at.save_id, None, str(root / "run"))
    assert await code_of(StoredCheckpointFiles().delete(through))
    assert files_in(outside) == before
    inside = saved(root / "run" / "deep" / "b")
    await StoredCheckpointFiles().delete(CheckpointLocation(inside.path, inside.save_id, None, str(root / "run")))
    assert files_in(root) == set()


async def test_linked_directory_of_parts_is_not_followed_out_of_the_root(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    at = saved(outside / "a")
    root.mkdir()
    (outside / f"a{SUFFIX}").rename(root / f"a{SUFFIX}")
    (root / "a").symlink_to(outside / "a")
    before = files_in(outside)
    assert await code_of(
        StoredCheckpointFiles().delete(CheckpointLocation(str(root / "a"), at.save_id, None, str(root)))
    )
    assert files_in(outside) == before


async def test_nothing_is_deleted_where_a_swapped_link_leads(tmp_path: Path) -> None:
    """A tenant has the daemon delete a checkpoint, and replaces its folder by a link to a copy of another tenant's."""
    root, victim = tmp_path / "root", tmp_path / "victim"
    at = saved(root / "run" / "a")
    (root / "run" / "notes").touch()
    shutil.copytree(root / "run", victim)
    before, files = contents_of(victim), StoredCheckpointFiles()
    location = CheckpointLocation(at.path, at.save_id, None, str(root))
    with swapped(root / "run", victim):
        for _ in range(50):
            for call in (files.repair(location), files.delete(location)):
                with suppress(ForgedError):
                    await call
    assert contents_of(victim) == before
    await files.delete(location)
    assert contents_of(root) == {"run": None, "run/notes": b""}


def chain_of_two(folder: Path) -> list[CheckpointLocation]:
    """A full checkpoint, and an incremental one that uses its files."""
    rows = np.random.default_rng(7).random((8, 1 << 14))
    with checkpoint.Checkpoints(folder, incremental=True) as saves:
        for step in (1, 2):
            rows[0] = step
            saves.save(step, {"w": rows})
    names = ["step-00000001", "step-00000002"]
    ids = [listing.read_manifest(*storage_at(folder / name)).save_id for name in names]
    return [CheckpointLocation(str(folder / name), save_id, None) for name, save_id in zip(names, ids, strict=True)]


async def test_parent_that_is_used_is_deleted_after_the_compaction(tmp_path: Path) -> None:
    files, seen = StoredCheckpointFiles(), list[int]()
    parent, child = chain_of_two(tmp_path)
    assert await code_of(files.delete(parent)) == "checkpoint_needed"
    found = await files.find(child)
    assert found is not None
    assert found.parent_path == parent.path
    size = await files.compact(child, lambda done, total: seen.append(done))
    assert await files.find(child) == FoundCheckpoint(size, "")
    assert seen
    await files.delete(parent)
    assert await files.verify(child, 1 << 40, no_progress) == ""
    assert {name.partition("/")[0].removesuffix(SUFFIX) for name in files_in(tmp_path)} == {"step-00000002"}
    gone = CheckpointLocation(parent.path, parent.save_id, None)
    assert await code_of(files.compact(gone, no_progress)) == "checkpoint_missing"


async def test_files_of_a_parent_without_manifest_stay_while_they_are_used(tmp_path: Path) -> None:
    files = StoredCheckpointFiles()
    parent, child = chain_of_two(tmp_path)
    (tmp_path / f"step-00000001{SUFFIX}").unlink()
    assert await code_of(files.delete(parent)) == "checkpoint_needed"
    assert await files.verify(child, 1 << 40, no_progress) == ""
    await files.delete(child)
    await files.delete(parent)
    assert files_in(tmp_path) == set()


async def test_storage_in_memory_works(tmp_path: Path) -> None:
    files, at = StoredCheckpointFiles(), saved(f"memory://{tmp_path.name}/a")
    assert await files.find(at)
    assert await files.verify(at, 1 << 30, no_progress) == ""
    await files.delete(at)
    assert await files.find(at) is None


OPERATIONS: dict[str, Any] = {
    "_find": lambda files, at: files.find(at),
    "_delete": lambda files, at: files.delete(at),
    "_verify": lambda files, at: files.verify(at, 1 << 30, no_progress),
    "_repair": lambda files, at: files.repair(at),
    "_compact": lambda files, at: files.compact(at, no_progress),
}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_storage_that_does_not_answer_is_given_up_and_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    begun, answers = threading.Event(), threading.Event()
    at, operation = saved(tmp_path / "a"), OPERATIONS[name]
    real = getattr(stored_files, name)

    def hang(location: CheckpointLocation, *rest: Any) -> Any:
        if location == at:
            begun.set()
            answers.wait(60.0)
        return real(location, *rest)

    monkeypatch.setattr(stored_files, name, hang)
    files = StoredCheckpointFiles(timeout_s=0.05)
    try:
        # On a busy machine the thread may not begin in time.
        while not begun.is_set():
            assert await code_of(operation(files, at)) == STORAGE_HANGS
        assert await code_of(operation(files, at)) in {STORAGE_HANGS, "checkpoint_in_use"}
        # Its thread may write files behind the deletion.
        assert await code_of(files.delete(at)) == "checkpoint_in_use"
        files._timeout_s = 60.0
        await files.delete(saved(tmp_path / "elsewhere" / "b"))
    finally:
        answers.set()


async def test_only_so_many_threads_hang_in_a_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, begun = threading.Event(), list[str]()

    def hang(location: CheckpointLocation, token: Any) -> None:
        begun.append(location.path)
        answers.wait(60.0)

    monkeypatch.setattr(stored_files, "_find", hang)
    files = StoredCheckpointFiles(timeout_s=0.05)
    monkeypatch.setattr(files._mounts, "of", lambda path: "/" + path.split("/")[1])
    try:
        for number in range(2 * HUNG_MAX):
            at = CheckpointLocation(f"/hung/{number}/a", "00000000", None)
            assert await code_of(files.find(at)) == STORAGE_HANGS
        assert len(begun) <= HUNG_MAX
        monkeypatch.undo()
        files._timeout_s = 60.0
        assert await files.find(saved(tmp_path / "a")) is not None
    finally:
        answers.set()


def test_storage_of_a_path_is_its_mount_point_or_bucket() -> None:
    files = StoredCheckpointFiles()
    assert files.storage_of("s3://bucket/run/a") == files.storage_of("s3://bucket/other/b") == "s3://bucket"
    assert files.storage_of("/proc/run/a") == files.storage_of("file:///proc/b") == "/proc"


async def test_unexpected_error_is_one_of_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(location: Any, token: Any) -> int:
        raise OSError("bad sector")

    monkeypatch.setattr(stored_files, "_find", fail)
    with pytest.raises(Unavailable, match="bad sector"):
        await StoredCheckpointFiles().find(saved(tmp_path / "a"))
