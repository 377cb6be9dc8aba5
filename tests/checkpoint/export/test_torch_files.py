"""Torch's files without torch: what is written is read back; damaged and hostile files are refused.

`tests/torch/test_convert.py` has torch itself at the other end.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forged.checkpoint as fc
from forged.checkpoint import CheckpointException, ConversionOptions, convert
from forged.checkpoint.export import torch_pickle
from forged.checkpoint.export.torch_directories import open_torch_directory
from forged.checkpoint.export.torch_files import open_torch_file
from forged.checkpoint.export.torch_pickle import Call, Global, Instance, Pairs, StoredTensor, encode
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.ports import CancelToken
from tests.checkpoint.fixtures.memory_storage import MemoryStorage

STATE: dict[str, Any] = {
    "model": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float16)},
    "opt": {"state": {0: {"step": np.array(3.0, np.float32)}}, "groups": [{"lr": 0.1, "params": [0]}]},
    "step": 3,
}
METADATA = "torch.distributed.checkpoint.metadata"
LAUGHS = 40


def file_of(folder: Path, state: Any = STATE) -> bytes:
    """A file of torch with this state."""
    fc.save(folder / "ckpt", state)
    convert(folder / "ckpt", folder / "valid.pt")
    return (folder / "valid.pt").read_bytes()


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return file_of(tmp_path_factory.mktemp("valid"))


def read(data: bytes) -> dict[str, Any]:
    """All arrays of a file."""
    storage = MemoryStorage()
    storage.publish("x.pt", data)
    with open_torch_file(storage, "x.pt", CancelToken()) as found:
        into = {
            number: np.empty(shape, dtype_of(dtype))
            for number, (shape, dtype) in enumerate(zip(found.tensors.shapes, found.tensors.dtypes, strict=True))
        }
        found.fetch(list(into), {}, into)
        return dict(zip(found.tensors.names, into.values(), strict=True))


def refusal(data: bytes) -> CheckpointException:
    with pytest.raises(CheckpointException) as raised:
        read(data)
    assert raised.value.message.startswith("x.pt cannot be read: ")
    assert raised.value.fix
    assert raised.value.checkpoint_path == "x.pt"
    return raised.value


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as target:
        for name, data in members.items():
            target.writestr(f"a/{name}", data)
    return out.getvalue()


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        return {name.partition("/")[2]: source.read(name) for name in source.namelist()}


def test_files_that_are_written_are_read_back(valid: bytes) -> None:
    found = read(valid)
    assert found["model/w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["opt/state/#0/step"] == 3.0
    assert set(found) == {"model/w", "model/b", "opt/state/#0/step"}


def test_directories_that_are_written_are_read_back(tmp_path: Path) -> None:
    fc.save(tmp_path / "ckpt", STATE)
    converted = convert(tmp_path / "ckpt", tmp_path / "dcp", ConversionOptions(is_torch_directory=True))
    assert sorted(path.name for path in (tmp_path / "dcp").iterdir()) == [".metadata", "__0_0.distcp"]
    assert converted.size_bytes == sum(path.stat().st_size for path in (tmp_path / "dcp").iterdir())
    convert(tmp_path / "dcp", tmp_path / "again")
    found, before = fc.load(tmp_path / "again"), fc.load(tmp_path / "ckpt")
    assert repr(found) == repr(before)


def test_per_rank_values_of_other_ranks_are_left_out(tmp_path: Path) -> None:
    fc.save(tmp_path / "ckpt", {"a": fc.PerRank(np.ones(2)), "b": 1})
    assert convert(tmp_path / "ckpt", tmp_path / "a.pt").tensors == 1


class TestFiles:
    @given(st.data())
    def test_truncated_file_is_refused(self, valid: bytes, data: st.DataObject) -> None:
        refusal(valid[: data.draw(st.integers(0, len(valid) - 1))])

    @given(st.data())
    def test_changed_bytes_are_read_or_refused(self, valid: bytes, data: st.DataObject) -> None:
        changed = bytearray(valid)
        for at in data.draw(st.lists(st.integers(0, len(valid) - 1), min_size=1, max_size=3)):
            changed[at] = data.draw(st.integers(0, 255))
        with suppress(CheckpointException):
            read(bytes(changed))

    @given(st.data())
    def test_changed_pickle_is_read_or_refused(self, valid: bytes, data: st.DataObject) -> None:
        parts = members(valid)
        changed = bytearray(parts["data.pkl"])
        for at in data.draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=3)):
            changed[at] = data.draw(st.integers(0, 255))
        with suppress(CheckpointException):
            read(archive(parts | {"data.pkl": bytes(changed)}))

    def test_compressed_members_are_refused_without_unpacking_them(self, valid: bytes) -> None:
        bomb = archive(members(valid) | {"data/0": bytes(50_000_000)}, zipfile.ZIP_DEFLATED)
        assert len(bomb) < 100_000
        assert "is compressed" in refusal(bomb).message

    def test_members_that_overlap_are_refused(self, valid: bytes) -> None:
        parts = members(valid)
        data = bytearray(archive({"data.pkl": parts["data.pkl"], "data/0": bytes(24), "data/1": bytes(4)}))
        first = data.rindex(b"PK\x01\x02")
        data[first + 42 : first + 46] = bytes(4)
        assert refusal(bytes(data)).fix

    def test_storage_of_another_size_is_refused(self, valid: bytes) -> None:
        parts = members(valid)
        [name] = [name for name, data in parts.items() if name.startswith("data/") and len(data) == 24]
        assert "has 20 bytes instead of 24" in refusal(archive(parts | {name: bytes(20)})).message
        del parts[name]
        assert "is missing" in refusal(archive(parts)).message

    def test_content_with_another_checksum_is_refused(self, valid: bytes) -> None:
        at = valid.index(STATE["model"]["w"].tobytes())
        changed = valid[:at] + b"\xff" + valid[at + 1 :]
        assert "CRC" in refusal(changed).message

    def test_big_endian_file_is_refused(self, valid: bytes) -> None:
        assert "big-endian" in refusal(archive(members(valid) | {"byteorder": b"big"})).message

    @pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04", pickle.dumps({}), torch_pickle.encode({})])
    def test_other_files_are_refused(self, data: bytes) -> None:
        refusal(data)

    @pytest.mark.parametrize("parts", [{}, {"x": b""}, {"data.pkl": b"", "constants.pkl": b""}])
    def test_other_archives_are_refused(self, parts: dict[str, bytes]) -> None:
        assert "no file of torch.save" in refusal(archive(parts)).message

    def test_pickle_beyond_the_limit_is_refused(self, valid: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forged.checkpoint.export.torch_files.PICKLE_BYTES_MAX", 10)
        assert "has more than 10 bytes" in refusal(valid).message

    def test_list_that_is_named_again_and_again_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_pickle, "NODES_MAX", 10_000)
        value: Any = [1]
        for _ in range(LAUGHS):
            value = [value, value]
        data = pickle.dumps({"a": value}, 2)
        assert len(data) < 1000
        assert "more than 10,000 values" in refusal(archive({"data.pkl": data})).message


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class TestPickles:
    @pytest.mark.parametrize("protocol", [2, 4])
    def test_nothing_that_is_named_is_called(self, protocol: int, tmp_path: Path) -> None:
        data = pickle.dumps({"a": Evil(tmp_path / "called")}, protocol)
        assert "is refused" in refusal(archive({"data.pkl": data})).message
        assert not (tmp_path / "called").exists()

    def test_ordered_dicts_with_attributes_are_read(self) -> None:
        value = OrderedDict(a=[1])
        value._metadata = {"version": 1}  # type: ignore[attr-defined]
        assert read(archive({"data.pkl": pickle.dumps({"m": value}, 2)})) == {}

    @pytest.mark.parametrize(
        "arguments",
        [
            (5, (2, 3), (3, 1)),
            (0, (2, 3), (3, 100)),
            (0, (2, 3), (-3, 1)),
            (-1, (2, 3), (3, 1)),
            (0, (2, 3), (1,)),
            (0, (1 << 62, 1 << 62), (0, 0)),
            (0, (1000, 6), (0, 1)),
            (0, [2, 3], (3, 1)),
            (0, (2.0, 3), (3, 1)),
            (0, (1,) * 100, (1,) * 100),
        ],
    )
    def test_tensor_outside_of_its_storage_is_refused(self, arguments: tuple[Any, ...]) -> None:
        storage = torch_pickle._Outside(("storage", Global("torch", "FloatStorage"), "0", "cpu", 6))
        tensor = Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, *arguments, False, {}))
        data = archive({"data.pkl": encode({"w": tensor}), "data/0": bytes(24)})
        assert "_rebuild_tensor_v2 has invalid arguments" in refusal(data).message

    @pytest.mark.parametrize(
        ("shape", "why"),
        [((1,) * 33, "it has 33 axes; limit 32"), ((1 << 61, 1), "its shape or its strides are invalid")],
    )
    def test_shape_that_would_take_long_to_multiply_is_refused_before(self, shape: tuple[int, ...], why: str) -> None:
        storage = torch_pickle._Outside(("storage", Global("torch", "FloatStorage"), "0", "cpu", 6))
        tensor = Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, (0,) * len(shape), False, {}))
        assert why in refusal(archive({"data.pkl": encode({"w": tensor}), "data/0": bytes(24)})).message

    @pytest.mark.parametrize("key", ["0", "../0", "x/../../etc/passwd", ""])
    def test_storage_that_is_no_member_is_refused(self, key: str) -> None:
        data = encode({"w": StoredTensor(key, "float32", (2,))})
        assert "is missing" in refusal(archive({"data.pkl": data})).message


def directory(**changes: Any) -> MemoryStorage:
    """A directory with one tensor of eight floats in two pieces, and these changes of its description."""
    given: dict[str, Any] = {
        "path": ("w",),
        "size": (8,),
        "offsets": [(0,), (4,)],
        "sizes": [(4,), (4,)],
        "file": "f",
        "length": None,
        "dtype": Global("torch", "float32"),
        "more": {},
    } | changes
    piece = archive({"data.pkl": encode(StoredTensor("0", "float32", (4,))), "data/0": np.ones(4, "f4").tobytes()})
    length = len(piece) if given["length"] is None else given["length"]

    def made(name: str, **fields: Any) -> Instance:
        return Instance(Global(METADATA, name), fields)

    chunks = [
        made("ChunkStorageMetadata", offsets=offset, sizes=size)
        for offset, size in zip(given["offsets"], given["sizes"], strict=True)
    ]
    properties = Instance(Global(METADATA, "TensorProperties"), (given["dtype"], 0, False, 0, False))
    where = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    stored = [
        (
            made("MetadataIndex", fqn="w", offset=(4 * number,), index=number),
            Instance(where, {"relative_path": given["file"], "offset": len(piece) * number, "length": length}
            | given["more"]),
        )
        for number in range(2)
    ]  # fmt: skip
    metadata = made(
        "Metadata",
        state_dict_metadata={
            "w": made("TensorStorageMetadata", properties=properties, size=given["size"], chunks=chunks)
        },
        planner_data={"w": given["path"]},
        storage_data=Pairs(stored),
    )
    storage = MemoryStorage()
    storage.publish("f", piece * 2)
    storage.publish(".metadata", encode(metadata))
    return storage


def arrays_in(storage: MemoryStorage) -> dict[str, Any]:
    with open_torch_directory(storage, CancelToken()) as found:
        into = {0: np.empty(found.tensors.shapes[0], np.float32)}
        found.fetch([0], {}, into)
        return dict(zip(found.tensors.names, into.values(), strict=True))


class TestDirectories:
    def test_pieces_of_a_tensor_are_put_together(self) -> None:
        assert arrays_in(directory())["w"].tolist() == [1] * 8

    @pytest.mark.parametrize(
        "changes",
        [
            {"size": (9,)},
            {"size": (1 << 60,)},
            {"size": (2, 4)},
            {"offsets": [(0,), (0,)]},
            {"offsets": [(0,), (5,)]},
            {"sizes": [(4,), (-4,)]},
            {"file": "../f"},
            {"file": "/etc/passwd"},
            {"file": 3},
            {"file": "g"},
            {"length": 1 << 40},
            {"length": 10},
            {"length": -1},
            {"dtype": Global("torch", "float64")},
            {"dtype": 3},
            {"path": ()},
            {"path": [1]},
            {"path": ((1,),)},
            {"more": {"transform_descriptors": ["zstd"]}},
        ],
        ids=str,
    )
    def test_invalid_description_is_refused(self, changes: dict[str, Any]) -> None:
        with pytest.raises(CheckpointException) as raised:
            arrays_in(directory(**changes))
        assert raised.value.fix

    @given(st.data())
    def test_changed_description_is_read_or_refused(self, data: st.DataObject) -> None:
        storage = directory()
        changed = bytearray(storage.read(".metadata", 1 << 20))
        for at in data.draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=3)):
            changed[at] = data.draw(st.integers(0, 255))
        storage.delete([".metadata"])
        storage.publish(".metadata", bytes(changed))
        with suppress(CheckpointException):
            arrays_in(storage)

    def test_nothing_that_the_description_names_is_called(self, tmp_path: Path) -> None:
        storage = MemoryStorage()
        storage.publish(".metadata", pickle.dumps(Evil(tmp_path / "called")))
        with pytest.raises(CheckpointException, match="is refused"):
            arrays_in(storage)
        assert not (tmp_path / "called").exists()
