from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Collection
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from forged.checkpoint import load, save
from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.export import conversion
from forged.checkpoint.export.conversion import ConversionOptions, convert
from forged.checkpoint.format.manifest import SUFFIX, Manifest
from forged.checkpoint.loading.loader import load_state
from forged.checkpoint.model import CheckpointFormat, CompressionLevel, PerRank, ShardedArray
from forged.checkpoint.ports import CancelToken
from forged.checkpoint.storage import listing
from forged.checkpoint.storage.local import LocalStorage
from forged.checkpoint.storage.locations import storage_at
from tests.checkpoint.fixtures.faulty_storage import broken
from tests.checkpoint.fixtures.memory_storage import MemoryStorage
from tests.checkpoint.fixtures.plain_writer import write_checkpoint
from tests.checkpoint.fixtures.sameness import require_same

Array = np.ndarray[Any, Any]
ROWS = 900
FORMATS = list(CheckpointFormat)
LEVELS = [CompressionLevel.NONE, CompressionLevel.FAST]


def arrays() -> dict[str, Array]:
    draw = np.random.default_rng(3)
    return {
        "w": draw.standard_normal((ROWS, 257)).astype(np.float32),
        "half": draw.standard_normal((40, 7)).astype(ml_dtypes.bfloat16),
        "steps": np.arange(3),
        "none": np.empty((0, 2), np.int8),
        "one": np.array(2.5),
    }


def states(ranks: int) -> list[Any]:
    """The states of the ranks."""
    found = arrays()
    w, half = found["w"], found["half"]
    cut = [ROWS * rank // ranks for rank in range(ranks + 1)]
    return [
        {
            "model": {
                "w": ShardedArray(w[cut[rank] : cut[rank + 1]], w.shape, (cut[rank], 0)),
                "blocks": [{"half": half}, {"half": half + half}],
            },
            "optimizer": {"steps": found["steps"], "lr": 0.125, "one": found["one"]},
            "none": found["none"],
            "rng": PerRank({"words": np.arange(rank, rank + 4)}),
            "epoch": 7,
            "nothing": None,
        }
        for rank in range(ranks)
    ]


def saved(folder: Path, ranks: int = 3, level: CompressionLevel = CompressionLevel.NONE) -> Manifest:
    return write_checkpoint(LocalStorage(str(folder)), "from", states(ranks), level=level)


def loaded(folder: Path, prefix: str, rank: int = 0, ranks: int = 1) -> Any:
    storage = LocalStorage(str(folder))
    return load_state(storage, listing.read_manifest(storage, prefix), rank=rank, world_size=ranks).state


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def error_of(act: Callable[[], object]) -> CheckpointException:
    with pytest.raises(CheckpointException) as caught:
        act()
    return caught.value


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("from_level", LEVELS)
def test_every_rank_loads_its_state_from_another_format(
    layout: CheckpointFormat, level: CompressionLevel, from_level: CompressionLevel, tmp_path: Path
) -> None:
    saved(tmp_path, level=from_level)
    done = convert(tmp_path / "from", tmp_path / "to", ConversionOptions(layout, level, file_bytes_max=1 << 19))
    manifest = listing.read_manifest(LocalStorage(str(tmp_path)), "to")
    assert (manifest.layout, manifest.compression) == (layout, level)
    assert (done.size_bytes, done.left_out, done.repaired) == (manifest.size_bytes, (), ())
    assert done.size_bytes == sum((tmp_path / file).stat().st_size for file in listing.files_of(manifest))
    for rank, state in enumerate(states(3)):
        require_same(loaded(tmp_path, "to", rank, 3), state)


def test_the_default_format_is_the_sources(tmp_path: Path) -> None:
    source = saved(tmp_path)
    convert(tmp_path / "from", tmp_path / "to")
    made = listing.read_manifest(LocalStorage(str(tmp_path)), "to")
    assert (made.layout, made.created_at, made.tensors) == (source.layout, source.created_at, source.tensors)
    assert [(part.rank, part.partial_boxes, part.digests) for part in made.parts] == [
        (part.rank, part.partial_boxes, part.digests) for part in source.parts
    ]


def test_a_checkpoint_converts_to_a_safetensors_file(tmp_path: Path) -> None:
    saved(tmp_path)
    done = convert(tmp_path / "from", tmp_path / "model.safetensors")
    expected = arrays()
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        assert set(file.keys()) == {
            *("w", "blocks.0.half", "blocks.1.half", "optimizer.steps", "optimizer.one", "none"),
            *(f"rng.words@{rank}" for rank in range(3)),
        }
        np.testing.assert_array_equal(file.get_tensor("w"), expected["w"])
        np.testing.assert_array_equal(file.get_tensor("rng.words@2"), np.arange(2, 6))
    assert done.left_out == ("epoch", "optimizer/lr")
    assert done.size_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_a_safetensors_file_converts_to_a_checkpoint(tmp_path: Path) -> None:
    found = {"a.weight": np.arange(6.0).reshape(2, 3), "b": np.zeros((0, 4), np.int8), "with/slash": np.ones(())}
    safetensors.numpy.save_file(found, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "to", ConversionOptions(wall=lambda: 1234.0))
    state = loaded(tmp_path, "to")
    assert set(state) == {"model"}
    for name, array in found.items():
        require_same(state["model"][name], array)
    manifest = listing.read_manifest(LocalStorage(str(tmp_path)), "to")
    assert (manifest.layout, manifest.created_at) == (CheckpointFormat.SINGLE_FILE, 1234.0)


@pytest.mark.parametrize("layout", FORMATS)
def test_a_model_in_several_files_is_found_by_index_or_directory(layout: CheckpointFormat, tmp_path: Path) -> None:
    saved(tmp_path)
    convert(
        tmp_path / "from", tmp_path / "hf", ConversionOptions(CheckpointFormat.CONSOLIDATED, file_bytes_max=1 << 19)
    )
    (tmp_path / "hf.metadata.json").unlink()
    index = tmp_path / "hf" / "model.safetensors.index.json"
    assert len(set(json.loads(index.read_text())["weight_map"].values())) == 2
    for number, source in enumerate((index, tmp_path / "hf")):
        convert(source, tmp_path / f"to{number}", ConversionOptions(layout))
        state = loaded(tmp_path, f"to{number}")["model"]
        require_same(state["w"], arrays()["w"])
        require_same(state["blocks.0.half"], arrays()["half"])


def test_a_directory_with_one_file_is_converted(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    safetensors.numpy.save_file({"a": np.arange(3)}, tmp_path / "hf" / "weights.safetensors")
    convert(tmp_path / "hf", tmp_path / "to")
    require_same(loaded(tmp_path, "to"), {"model": {"a": np.arange(3)}})


def test_a_checkpoint_converts_to_an_archive_that_numpy_opens(tmp_path: Path) -> None:
    saved(tmp_path)
    done = convert(tmp_path / "from", tmp_path / "x.npz")
    expected = arrays()
    with np.load(tmp_path / "x.npz", allow_pickle=False) as found:
        assert set(found) == {
            *("model/w", "model/blocks/#0/half", "model/blocks/#1/half", "optimizer/steps", "optimizer/one", "none"),
            *(f"rng/words@{rank}" for rank in range(3)),
        }
        for name, key in (("model/w", "w"), ("optimizer/steps", "steps"), ("none", "none"), ("optimizer/one", "one")):
            require_same(found[name], expected[key])
        assert found["model/blocks/#0/half"].tobytes() == expected["half"].tobytes()
    assert done.size_bytes == (tmp_path / "x.npz").stat().st_size
    with zipfile.ZipFile(tmp_path / "x.npz") as archive:
        assert archive.testzip() is None


def test_a_checkpoint_survives_conversion_to_an_archive_and_back(tmp_path: Path) -> None:
    state = {
        "model": {"blocks": [{"w": np.arange(5.0)}, {"w": np.arange(6.0)}], "a/b~c": np.ones(2)},
        "half": np.arange(8).astype(ml_dtypes.bfloat16),
        "tiny": np.arange(8).astype(ml_dtypes.float8_e4m3fn),
        "texts": np.array(["a", "bcd"]),
        "swapped": np.arange(3, dtype=">i4"),
        "large": np.arange(700_000, dtype=np.float32).reshape(700, 1000),
    }
    write_checkpoint(LocalStorage(str(tmp_path)), "from", [state])
    convert(tmp_path / "from", tmp_path / "x.npz")
    convert(tmp_path / "x.npz", tmp_path / "to")
    require_same(loaded(tmp_path, "to"), state)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_numpy_archives_convert_to_checkpoints(save: Callable[..., None], tmp_path: Path) -> None:
    found = {
        "plain": np.arange(300_000.0).reshape(1000, 300),
        "fortran": np.asfortranarray(np.arange(300_000.0).reshape(1000, 300)),
        "few": np.asfortranarray(np.arange(6, dtype=np.complex64).reshape(1, 2, 3)),
        "empty": np.empty((3, 0), order="F"),
        "number": np.array(7),
        "time": np.array(["2024-01-01"], "M8[D]"),
    }
    save(tmp_path / "x.npz", **found)
    convert(tmp_path / "x.npz", tmp_path / "to")
    require_same(loaded(tmp_path, "to"), {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in found.items()})


def test_progress_is_reported_up_to_the_total(tmp_path: Path) -> None:
    saved(tmp_path)
    for target in ("to", "x.safetensors", "x.npz"):
        calls: list[tuple[int, int]] = []
        record = partial(_record, calls)
        convert(tmp_path / "from", tmp_path / target, ConversionOptions(progress=record))
        assert calls == sorted(calls)
        assert calls[-1][0] == calls[-1][1] > 0
        assert len({total for _, total in calls}) == 1


def _record(calls: list[tuple[int, int]], done: int, total: int) -> None:
    calls.append((done, total))


@pytest.mark.parametrize("target", ["to", "x.safetensors", "x.npz"])
def test_an_existing_target_is_not_replaced(target: str, tmp_path: Path) -> None:
    saved(tmp_path)
    convert(tmp_path / "from", tmp_path / target)
    before = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    error = error_of(lambda: convert(tmp_path / "from", tmp_path / target))
    assert error.code == "checkpoint_exists"
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == before


@pytest.mark.parametrize("target", ["to", "x.safetensors", "x.npz"])
def test_a_failed_publication_leaves_nothing(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    before = files_in(tmp_path)

    def fail(self: LocalStorage, names: Collection[str]) -> None:
        raise broken()

    monkeypatch.setattr(LocalStorage, "sync_names", fail)
    assert error_of(lambda: convert(tmp_path / "from", tmp_path / target)).code == "broken"
    assert files_in(tmp_path) == before


def test_a_checkpoint_without_tensors_has_no_files(tmp_path: Path) -> None:
    for made in FORMATS:
        save(tmp_path / made, {"step": 1}, format=made)
        for wanted in FORMATS:
            convert(tmp_path / made, tmp_path / f"{made}-{wanted}", ConversionOptions(wanted))
            assert load(tmp_path / f"{made}-{wanted}") == {"step": 1}
    assert all(name.endswith(SUFFIX) for name in files_in(tmp_path))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("target", ["to", "x.safetensors", "x.npz"])
def test_a_corrupt_source_gives_no_target(target: str, level: CompressionLevel, tmp_path: Path) -> None:
    manifest = saved(tmp_path)
    bad = tmp_path / manifest.parts[1].file
    data = bytearray(bad.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    before = files_in(tmp_path)
    how = ConversionOptions(CheckpointFormat.CONSOLIDATED, level if target == "to" else CompressionLevel.NONE)
    error = error_of(lambda: convert(tmp_path / "from", tmp_path / target, how))
    assert error.code == "checkpoint_chunk_corrupt"
    assert manifest.parts[1].file in error.message
    assert files_in(tmp_path) == before


def test_a_healthy_copy_is_used_and_reported(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    state = {"w": np.arange(50_000.0)}
    manifest = write_checkpoint(storage, "from", [state, state], copies=2)
    for part in manifest.parts:
        bad = tmp_path / part.file
        data = bytearray(bad.read_bytes())
        data[part.data_offset + part.rank * 200_000] ^= 1
        bad.write_bytes(data)
    done = convert(tmp_path / "from", tmp_path / "to", ConversionOptions(CheckpointFormat.SINGLE_FILE))
    assert done.repaired
    require_same(loaded(tmp_path, "to"), state)


@pytest.mark.parametrize("target", ["to", "x.safetensors", "x.npz"])
def test_raising_progress_callback_does_not_fail_the_conversion(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path)

    def fail(done: int, total: int) -> None:
        raise ValueError("the bar is broken")

    convert(tmp_path / "from", tmp_path / target, ConversionOptions(progress=fail))
    assert capsys.readouterr().err == "forged: the progress callback failed: ValueError: the bar is broken\n"
    assert (tmp_path / (target if "." in target else f"{target}.metadata.json")).exists()


@pytest.mark.parametrize("target", ["to", "x.safetensors", "x.npz"])
def test_cancellation_stops_the_conversion_and_leaves_nothing(target: str, tmp_path: Path) -> None:
    saved(tmp_path)
    before = files_in(tmp_path)
    token = CancelToken()
    how = ConversionOptions(CheckpointFormat.CONSOLIDATED, progress=lambda done, total: token.cancel())
    error = error_of(lambda: convert(tmp_path / "from", tmp_path / target, how, token))
    assert error.code == "checkpoint_cancelled"
    assert files_in(tmp_path) == before


class HaltedStorage(MemoryStorage):
    """A storage that raises once its token is cancelled."""

    token = CancelToken()

    def bounded(self, token: CancelToken) -> HaltedStorage:
        other = copy(self)
        other.token = token
        return other

    def delete(self, names: Collection[str]) -> None:
        self.token.check()
        super().delete(names)


def test_written_files_are_deleted_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    target, token = HaltedStorage(), CancelToken()

    def progress(done: int, total: int) -> None:
        if target.files:
            token.cancel()

    monkeypatch.setattr(conversion, "storage_at", lambda where: (target, "b") if where == "to" else storage_at(where))
    how = ConversionOptions(CheckpointFormat.CONSOLIDATED, file_bytes_max=1, progress=progress)
    assert error_of(lambda: convert(tmp_path / "from", "to", how, token)).code == "checkpoint_cancelled"
    assert target.files == {}


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    assert error_of(lambda: convert(tmp_path / "from", tmp_path / "to")).code == "checkpoint_missing"
    assert error_of(lambda: convert(tmp_path / "x.npz", tmp_path / "to")).code == "checkpoint_file_missing"
    (tmp_path / "many").mkdir()
    for name in ("a", "b"):
        safetensors.numpy.save_file({"a": np.arange(3)}, tmp_path / "many" / f"{name}.safetensors")
    assert error_of(lambda: convert(tmp_path / "many", tmp_path / "to")).code == "checkpoint_missing"


def test_compression_of_other_tools_files_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    how = ConversionOptions(compression=CompressionLevel.FAST)
    assert "compress" in error_of(lambda: convert(tmp_path / "from", tmp_path / "x.npz", how)).message
    assert error_of(lambda: convert(tmp_path / "from", tmp_path / "x.safetensors.index.json")).fix


def test_conversion_between_storages(tmp_path: Path) -> None:
    saved(tmp_path / "here")
    convert(
        tmp_path / "here" / "from", tmp_path / "there" / "deep" / "to", ConversionOptions(CheckpointFormat.SINGLE_FILE)
    )
    require_same(loaded(tmp_path / "there" / "deep", "to", 1, 3), states(3)[1])
