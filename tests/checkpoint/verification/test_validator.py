"""Every fault of a checkpoint is found and reported with its location."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException, ExceptionType, storage_error
from forged.checkpoint.format.manifest import Manifest, encode
from forged.checkpoint.loading.loader import load_state
from forged.checkpoint.loading.manifest_index import Index
from forged.checkpoint.model import CompressionLevel, PerRank, ShardedArray
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.verification.validator import (
    FINDINGS_MAX,
    CheckpointValidator,
    Finding,
    IntegrityChecker,
    ValidationResult,
    verify,
)
from tests.checkpoint.fixtures.layouts import small_chunks
from tests.checkpoint.fixtures.memory_storage import MemoryReader, MemoryStorage
from tests.checkpoint.fixtures.plain_reader import same
from tests.checkpoint.fixtures.plain_writer import write_checkpoint

FLIPS = 10_000
FLIPS_AT_ONCE = 4
LOADED_EVERY = 3
W = np.random.default_rng(0).normal(size=(500, 400)).astype(np.float32)
STATES: list[Any] = [
    {
        "model": {"w": ShardedArray(W[rank * 250 : rank * 250 + 250], W.shape, (rank * 250, 0)), "b": np.arange(7)},
        "rng": PerRank({"words": np.full(5, rank)}),
        "odd": np.array(["2024-01-01"], "M8[D]"),
        "empty": np.zeros((0, 3)),
    }
    for rank in range(2)
]


def saved(level: CompressionLevel = CompressionLevel.NONE) -> tuple[MemoryStorage, Manifest]:
    storage = MemoryStorage()
    return storage, write_checkpoint(storage, "a", STATES, level=level)


def check(storage: Storage, *, deep: bool = True) -> ValidationResult:
    return CheckpointValidator(storage).validate_checkpoint("a", deep=deep)


def loaded_or_refused(storage: Storage, manifest: Manifest, rank: int, sound: Any) -> bool:
    """Whether a load gives the saved state, possibly repaired, or raises for the corrupt part."""
    try:
        return same(load_state(storage, manifest, rank=rank, world_size=2).state, sound)
    except CheckpointException as error:
        return error.type is ExceptionType.CORRUPTED_CHECKPOINT


class TestValid:
    @pytest.mark.parametrize("level", list(CompressionLevel))
    def test_an_intact_checkpoint_is_valid_and_fully_checked(self, level: CompressionLevel) -> None:
        storage, manifest = saved(level)
        result = check(storage)
        assert result.is_valid
        assert not result.has_warnings
        assert result.get_summary() == "a is valid: manifest ok, files ok, chunks ok"
        assert result.bytes_checked == sum(part.size - part.data_offset for part in manifest.parts)
        assert result.manifest == manifest
        result.require_valid("a")

    def test_progress_is_reported_up_to_the_total(self) -> None:
        storage, manifest = saved()
        calls: list[tuple[int, int]] = []
        CheckpointValidator(storage).validate_checkpoint("a", progress=lambda done, total: calls.append((done, total)))
        total = sum(part.size - part.data_offset for part in manifest.parts)
        assert calls[-1] == (total, total)
        assert calls == sorted(calls)

    def test_raising_progress_callback_does_not_fail_the_validation(self, capsys: pytest.CaptureFixture[str]) -> None:
        storage, manifest = saved()
        calls: list[int] = []

        def fail(done: int, total: int) -> None:
            calls.append(done)
            raise ValueError("the bar is broken")

        result = CheckpointValidator(storage).validate_checkpoint("a", progress=fail)
        assert result.is_valid
        assert result.bytes_checked == sum(part.size - part.data_offset for part in manifest.parts)
        assert len(calls) == 1
        assert capsys.readouterr().err == "forged: the progress callback failed: ValueError: the bar is broken\n"

    def test_a_shallow_validation_reads_only_headers(self) -> None:
        storage, manifest = saved()
        assert check(storage, deep=False).is_valid
        assert storage.bytes_read == sum(part.data_offset for part in manifest.parts)


class TestCorruption:
    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_any_flipped_bit_of_a_part_is_found_and_named(self, data: st.DataObject) -> None:
        storage, manifest = saved()
        part = data.draw(st.sampled_from(manifest.parts))
        offset = data.draw(st.integers(0, part.size - 1) | st.integers(0, part.data_offset - 1))
        storage.damage(part.file, offset, 1 << data.draw(st.integers(0, 7)))
        (error,) = check(storage).errors
        assert (error.file, error.rank) == (part.file, part.rank)
        assert (error.tensor is None) == (offset < part.data_offset)

    def test_ten_thousand_flipped_bits_are_all_found_and_none_is_loaded(self) -> None:
        storage, manifest = saved()
        sound = [load_state(storage, manifest, rank=rank, world_size=2).state for rank in range(2)]
        starts = [Index(manifest).layout(part.rank).file_offsets for part in manifest.parts]
        random = Random(FLIPS)
        for turn in range(FLIPS // FLIPS_AT_ONCE):
            flips, chunks = [], set()
            for _ in range(FLIPS_AT_ONCE):
                part = random.choice(manifest.parts)
                offset = random.randrange(part.data_offset, part.size)
                flips.append((part.file, offset, 1 << random.randrange(8)))
                chunks.add((part.file, part.rank, bisect_right(starts[part.rank], offset)))
            for flip in flips:
                storage.damage(*flip)
            errors = check(storage).errors
            assert all(error.tensor for error in errors)
            assert Counter((error.file, error.rank) for error in errors) == Counter(chunk[:2] for chunk in chunks)
            assert len({(error.file, error.tensor, error.chunk) for error in errors}) == len(chunks)
            if turn % LOADED_EVERY == 0:
                assert loaded_or_refused(storage, manifest, part.rank, sound[part.rank])
            for flip in flips:
                storage.damage(*flip)
        assert check(storage).is_valid

    def test_the_tensor_and_the_chunk_are_named(self) -> None:
        storage, manifest = saved()
        part = manifest.parts[1]
        storage.damage(part.file, Index(manifest).layout(1).file_offsets[2] - 1)
        (error,) = check(storage).errors
        assert (error.tensor, error.rank, error.file, error.chunk) == ("model/w", 1, part.file, 1)
        assert error.message.startswith(f"chunk 1 of model/w, written by rank 1 in {part.file} at byte ")

    @pytest.mark.parametrize("level", [CompressionLevel.FAST, CompressionLevel.MAXIMUM])
    def test_a_compressed_chunk_with_other_content_is_found(self, level: CompressionLevel) -> None:
        storage, manifest = saved(level)
        part = manifest.parts[0]
        assert part.stored is not None
        assert part.stored[0] > 0
        storage.files[part.file] = bytes(part.stored[0]) + storage.files[part.file][part.stored[0] :]
        (error,) = check(storage).errors
        assert (error.tensor, error.chunk) == ("model/w", 0)

    def test_all_faults_are_found_at_once(self) -> None:
        storage, manifest = saved()
        for number, part in enumerate(manifest.parts):
            for chunk in range(2):
                storage.damage(part.file, Index(manifest).layout(number).file_offsets[chunk])
        result = check(storage)
        assert [(error.rank, error.chunk) for error in result.errors] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        verdict, *lines = result.get_summary().splitlines()
        assert verdict == "a is invalid: manifest ok, files ok, chunks failed"
        assert lines == [f"  error: {error.message}" for error in result.errors]

    def test_the_number_of_findings_is_limited(self) -> None:
        storage = MemoryStorage()
        with small_chunks(16, 64, 1):
            part = write_checkpoint(storage, "a", [{"w": np.zeros(64 * 3 * FINDINGS_MAX, np.uint8)}]).parts[0]
            storage.files[part.file] = storage.files[part.file][: part.data_offset] + b"x" * (
                part.size - part.data_offset
            )
            result = check(storage)
        assert len(result.errors) == FINDINGS_MAX
        assert f"and {FINDINGS_MAX - 20} more" in result.get_summary()

    @pytest.mark.parametrize("deep", [False, True])
    def test_a_missing_file_is_found(self, deep: bool) -> None:
        storage, manifest = saved()
        del storage.files[manifest.parts[1].file]
        errors = check(storage, deep=deep).errors
        assert {(error.code, error.file) for error in errors} == {("checkpoint_file_missing", manifest.parts[1].file)}

    @pytest.mark.parametrize("change", [-1, 1, -200_000])
    def test_a_file_of_another_size_is_found(self, change: int) -> None:
        storage, manifest = saved()
        file = manifest.parts[0].file
        data = storage.files[file]
        storage.files[file] = data + b"x" if change > 0 else data[:change]
        result = check(storage, deep=False)
        assert [error.code for error in result.errors] == ["checkpoint_file_size"]
        assert f"{file} has {len(data) + change} bytes, expected {len(data)}" in result.get_summary()

    def test_missing_chunks_of_a_truncated_file_are_named(self) -> None:
        storage, manifest = saved()
        part = manifest.parts[1]
        storage.files[part.file] = storage.files[part.file][: Index(manifest).layout(1).file_offsets[2]]
        gone = [(error.tensor, error.chunk) for error in check(storage).errors if error.tensor]
        assert ("model/w", 2) in gone
        assert ("model/w", 1) not in gone

    def test_swapped_files_are_found(self) -> None:
        storage, manifest = saved()
        one, other = (part.file for part in manifest.parts)
        storage.files[one], storage.files[other] = storage.files[other], storage.files[one]
        assert not check(storage).is_valid

    def test_a_header_with_a_right_hash_and_other_arrays_is_found(self) -> None:
        storage = MemoryStorage()
        write_checkpoint(storage, "b", [{"w": np.zeros(4, np.float32)}])
        other = write_checkpoint(storage, "a", [{"w": np.zeros(4, np.int32)}])
        file, header = "b/00000000.00000-of-00001.safetensors", other.parts[0].data_offset
        storage.files[other.parts[0].file] = storage.files[file]
        parts = [msgspec.structs.replace(other.parts[0], header=_header_digest(storage.files[file][:header]))]
        storage.files[other.path] = encode(msgspec.structs.replace(other, parts=parts))
        assert check(storage, deep=False).is_valid
        assert [error.code for error in check(storage).errors] == ["checkpoint_header_differs"]

    def test_parts_that_do_not_cover_a_tensor_are_found(self) -> None:
        storage, manifest = saved()
        storage.files[manifest.path] = encode(msgspec.structs.replace(manifest, parts=manifest.parts[:1]))
        assert [error.code for error in check(storage).errors] == ["checkpoint_incomplete"]


class TestManifest:
    @settings(max_examples=100, deadline=None)
    @given(data=st.data())
    def test_any_flipped_bit_of_the_manifest_is_found(self, data: st.DataObject) -> None:
        storage, manifest = saved()
        offset = data.draw(st.integers(0, len(storage.files[manifest.path]) - 1))
        storage.damage(manifest.path, offset, 1 << data.draw(st.integers(0, 7)))
        result = check(storage)
        assert [error.file for error in result.errors] == [manifest.path]
        assert result.manifest is None

    def test_a_missing_checkpoint_is_found(self) -> None:
        assert [error.code for error in check(MemoryStorage()).errors] == ["checkpoint_missing"]

    def test_an_invalid_name_is_refused(self) -> None:
        with pytest.raises(CheckpointException):
            CheckpointValidator(MemoryStorage()).validate_checkpoint("../a")

    def test_a_missing_extra_file_is_a_warning(self) -> None:
        storage, manifest = saved()
        storage.files["a/model.safetensors.index.json"] = b"{}"
        extra = {"a/model.safetensors.index.json": 3, "a/gone.json": 1}
        storage.files[manifest.path] = encode(msgspec.structs.replace(manifest, extra_files=extra))
        result = check(storage)
        assert result.is_valid
        assert [one.code for one in result.warnings] == ["checkpoint_file_size", "checkpoint_file_missing"]
        assert "warning: there is no a/gone.json" in result.get_summary()

    def test_an_unreadable_version_is_reported_as_such(self) -> None:
        storage, manifest = saved()
        storage.files[manifest.path] = encode(msgspec.structs.replace(manifest, version="9.0"))
        with pytest.raises(CheckpointException, match=r"version 9\.0") as caught:
            check(storage).require_valid("a")
        assert caught.value.type is ExceptionType.INCOMPATIBLE_VERSION

    def test_a_readable_other_version_is_a_warning(self) -> None:
        storage, manifest = saved()
        storage.files[manifest.path] = encode(msgspec.structs.replace(manifest, version="1.9"))
        result = check(storage)
        assert result.is_valid
        assert [one.code for one in result.warnings] == ["checkpoint_version_other"]


class Small:
    """A custom checker that limits the number of tensors."""

    name = "small"

    def check(self, manifest: Manifest, storage: Storage, token: CancelToken) -> Iterable[Finding]:
        if manifest.size_bytes > 1_000:
            yield Finding("it is too large for us", "too_large")


class Broken:
    name = "broken"

    def check(self, manifest: Manifest, storage: Storage, token: CancelToken) -> Iterator[Finding]:
        raise ZeroDivisionError("oh")


class Files(Small):
    name = "files"


class TestBeforeLoad:
    def test_faults_of_files_are_warnings(self) -> None:
        storage, manifest = saved()
        del storage.files[manifest.parts[0].file]
        storage.damage(manifest.parts[1].file, 100)
        result = CheckpointValidator(storage).validate_before_load("a")
        result.require_valid("a")
        assert result.manifest == manifest
        assert [one.code for one in result.warnings] == ["checkpoint_file_missing", "checkpoint_header_corrupt"]

    def test_faults_of_the_manifest_are_errors(self) -> None:
        storage, manifest = saved()
        storage.damage(manifest.path, 100)
        assert not CheckpointValidator(storage).validate_before_load("a").is_valid

    @pytest.mark.parametrize("checker", [Small(), Files(), Broken()])
    def test_findings_of_checkers_stay_errors_for_any_checker_name(self, checker: IntegrityChecker) -> None:
        storage, _ = saved()
        assert not CheckpointValidator(storage, [checker]).validate_before_load("a").is_valid


class TestCheckers:
    def test_findings_of_a_checker_count(self) -> None:
        storage, _ = saved()
        result = CheckpointValidator(storage, [Small()]).validate_checkpoint("a")
        assert [error.code for error in result.errors] == ["too_large"]
        assert "small failed" in result.get_summary()
        with pytest.raises(CheckpointException) as caught:
            result.require_valid("a")
        assert caught.value.type is ExceptionType.VALIDATION_FAILED
        assert caught.value.code == "too_large"
        assert caught.value.checkpoint_path == "a"

    def test_a_failing_checker_is_a_finding_and_other_checks_continue(self) -> None:
        storage, _ = saved()
        result = CheckpointValidator(storage, [Broken()], [Small()]).validate_checkpoint("a")
        assert [error.code for error in result.errors] == ["checkpoint_checker_failed", "too_large"]
        assert "ZeroDivisionError: oh" in result.errors[0].message


class TestStorage:
    def test_an_unreadable_chunk_is_named_and_the_rest_is_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        storage, manifest = saved()
        part = manifest.parts[0]
        bad = part.data_offset + (1 << 17) + 9
        plain = MemoryReader.read_into

        def read_into(self: MemoryReader, offset: int, out: memoryview) -> None:
            if self.name == part.file and offset <= bad < offset + len(out):
                raise storage_error("the disk says no", self.name, code="checkpoint_storage_io")
            plain(self, offset, out)

        monkeypatch.setattr(MemoryReader, "read_into", read_into)
        (error,) = check(storage).errors
        assert (error.tensor, error.chunk, error.code) == ("model/w", 1, "checkpoint_storage_io")

    def test_cancellation_stops_the_validation(self) -> None:
        storage, _ = saved()
        token = CancelToken()
        token.cancel()
        with pytest.raises(CheckpointException) as caught:
            CheckpointValidator(storage).validate_checkpoint("a", token)
        assert caught.value.code == "checkpoint_cancelled"

    def test_verify_takes_a_path(self, tmp_path: Path) -> None:
        from forged.checkpoint.storage.local import LocalStorage

        storage = LocalStorage(tmp_path)
        manifest = write_checkpoint(storage, "run/a", STATES)
        assert verify(tmp_path / "run" / "a").is_valid
        file = tmp_path / manifest.parts[0].file
        data = bytearray(file.read_bytes())
        data[-1] ^= 4
        file.write_bytes(data)
        assert [error.tensor for error in verify(str(tmp_path / "run" / "a")).errors] == ["rng/words"]


def _header_digest(header: bytes) -> str:
    import base64

    import xxhash

    return base64.b64encode(xxhash.xxh3_128_digest(header)).decode()
