"""Files of torch to and from checkpoints, with torch itself at the other end."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import forged.checkpoint as fc
from forged.checkpoint import CheckpointException, ConversionOptions, convert
from forged.torch import tensor_of
from tests.torch.test_state import Training
from tests.torch.test_tensors import DTYPES, bits_of, some

TO_TORCH_DIRECTORY = ConversionOptions(is_torch_directory=True)


def state() -> dict[str, Any]:
    """The state of a training, with tensors of all types."""
    training = Training(1, dtype=torch.bfloat16)
    training.step(2)
    tied = torch.arange(6.0)
    return {
        "model": training.model.state_dict(),
        "opt": training.opt.state_dict(),
        "sched": training.sched.state_dict(),
        "types": {str(dtype): some(dtype, 3, 5) for dtype in DTYPES},
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "strided": torch.arange(24.0).reshape(4, 6).T[1::2],
        "tied": [tied, tied.view(2, 3), tied[2:4]],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "values": {"n": 3, "big": 2**70, "rate": 1e-3, "text": "ä/b", "none": None, "yes": True, "pair": (1, [2.0])},
    }


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit for bit; arrays stand for tensors."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        a, b = (tensor_of(each) if isinstance(each, np.ndarray) else each for each in (one, other))
        return (a.dtype, a.shape, bits_of(a)) == (b.dtype, b.shape, bits_of(b))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("ending", ["pt", "pth"])
def test_file_of_torch_becomes_a_checkpoint(ending: str, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / f"a.{ending}")
    converted = convert(tmp_path / f"a.{ending}", tmp_path / "ckpt")
    assert converted.left_out == ()
    assert same(state(), fc.load(tmp_path / "ckpt"))


def test_state_dict_alone_becomes_a_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ckpt")
    other = torch.nn.Linear(3, 2)
    fc.load(tmp_path / "ckpt", into=other)
    assert torch.equal(other.weight, model.weight)
    convert(tmp_path / "ckpt", tmp_path / "b.safetensors")


def test_checkpoint_becomes_a_file_that_torch_loads_with_weights_only(tmp_path: Path) -> None:
    fc.save(tmp_path / "ckpt", state())
    converted = convert(tmp_path / "ckpt", tmp_path / "a.pt")
    assert converted.left_out == ()
    assert same(state(), torch.load(tmp_path / "a.pt", weights_only=True))
    mapped = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    assert same(state(), mapped)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in mapped["types"].values())
    convert(tmp_path / "a.pt", tmp_path / "again")
    assert same(state(), fc.load(tmp_path / "again"))


def test_values_that_torch_lacks_are_left_out_and_named(tmp_path: Path) -> None:
    values = {"text": np.array(["a"]), "raw": b"x", "list": [b"x", 1], "big": np.zeros(2, ">f4"), "n": np.float32(0.5)}
    fc.save(tmp_path / "ckpt", values)
    converted = convert(tmp_path / "ckpt", tmp_path / "a.pt")
    assert converted.left_out == ("big", "list/#0", "raw", "text")
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"list": [None, 1], "n": 0.5}


class TestDirectories:
    def test_directory_of_dcp_becomes_a_checkpoint(self, tmp_path: Path) -> None:
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state(), checkpoint_id=tmp_path / "dcp")
        convert(tmp_path / "dcp", tmp_path / "ckpt")
        loaded = fc.load(tmp_path / "ckpt")
        assert same({**state(), "sched": loaded["sched"]}, {key: loaded[key] for key in state()})
        assert loaded["sched"].keys() == state()["sched"].keys()

    def test_checkpoint_becomes_a_directory_that_dcp_loads(self, tmp_path: Path) -> None:
        fc.save(tmp_path / "ckpt", state())
        convert(tmp_path / "ckpt", tmp_path / "dcp", TO_TORCH_DIRECTORY)
        training = Training(2, dtype=torch.bfloat16)
        training.step()
        into = {
            **state(),
            "model": training.model.state_dict(),
            "opt": training.opt.state_dict(),
            "types": {str(dtype): torch.zeros(3, 5).to(dtype) for dtype in DTYPES},
            "strided": torch.zeros(3, 4),
            "values": dict.fromkeys(state()["values"], 0),
        }
        with warnings.catch_warnings(action="ignore"):
            dcp.load(into, checkpoint_id=tmp_path / "dcp")
        assert same(state(), into)
        convert(tmp_path / "dcp", tmp_path / "again")
        again = fc.load(tmp_path / "again")
        assert same(state()["model"], again["model"])
        assert same(state()["opt"], again["opt"])

    def test_directory_that_is_not_empty_is_refused(self, tmp_path: Path) -> None:
        fc.save(tmp_path / "ckpt", {"a": np.ones(1)})
        (tmp_path / "dcp").mkdir()
        (tmp_path / "dcp" / "x").write_text("mine")
        with pytest.raises(CheckpointException, match="is not empty") as raised:
            convert(tmp_path / "ckpt", tmp_path / "dcp", TO_TORCH_DIRECTORY)
        assert raised.value.code == "checkpoint_exists"
        convert(tmp_path / "ckpt", tmp_path / "new", TO_TORCH_DIRECTORY)
        with pytest.raises(CheckpointException, match="is not empty"):
            convert(tmp_path / "ckpt", tmp_path / "new", TO_TORCH_DIRECTORY)


class Own:
    """A class of the script's own."""


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.nn.Linear(2, 2), "is refused"),
        ({"a": Own()}, "tests.torch.test_convert.Own is refused"),
        ({"a": np.float64(1)}, "is refused"),
        ({"a": {1, 2}}, "is refused"),
        ({"a": torch.float32}, "it has torch.float32 as a value"),
        ({"a": torch.ones(1).expand(1000)}, "it repeats elements of its storage"),
        ({"a": torch.ones(2, dtype=torch.complex64).conj()}, "conjugate or negative view"),
        ({"a": torch.eye(2).to_sparse()}, "is refused"),
        ({(1, 2): 3}, "a key is a tuple"),
    ],
    ids=["module", "class", "scalar", "set", "dtype", "expanded", "conjugate", "sparse", "key"],
)
def test_other_states_are_refused_with_the_file_and_a_fix(value: Any, what: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(CheckpointException, match=what) as raised:
        convert(tmp_path / "a.pt", tmp_path / "ckpt")
    assert raised.value.message.startswith("a.pt cannot be read: ")
    assert raised.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


def test_format_before_torch_1_6_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointException, match=r"format of torch before 1\.6"):
        convert(tmp_path / "a.pt", tmp_path / "ckpt")
