from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import forged.checkpoint as fc
from forged.checkpoint import CheckpointException
from forged.errors import RequestRefused
from forged.leaf_types import LeafRefused
from forged.torch import array_of, tensor_of
from forged.worker.state_transfer.encoding import Arriving, copy_of, pack

NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor with random bits; a bool has no other bits than 0 and 1."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(len(shape))
    count = int(np.prod(shape)) * size
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


def bits_of(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().contiguous().reshape(-1)
    return bytes(dense.view(torch.uint8).tolist() if dense.numel() else ())


def transferred(state: Any, into: Any) -> Any:
    """Send a state to another one, as from worker to worker."""
    packed = pack(state)
    arriving = Arriving(packed.head)
    for target, source in zip(arriving.parts, packed.parts, strict=True):
        target[:] = source
    arriving.adopt(into)
    return into


class TestArrays:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_array_is_the_memory_of_the_tensor(self, dtype: torch.dtype) -> None:
        tensor = some(dtype, 3, 5)
        array = array_of(tensor)
        assert array.ctypes.data == tensor.data_ptr()
        assert array.tobytes() == bits_of(tensor)
        assert array.dtype.name == str(dtype).removeprefix("torch.")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(), (0,), (3, 0), (4, 3)])
    def test_tensor_is_the_memory_of_the_array(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = some(dtype, *shape)
        array = array_of(tensor)
        back = tensor_of(array)
        assert (back.dtype, back.shape) == (dtype, tensor.shape)
        assert back.data_ptr() == tensor.data_ptr() or not tensor.numel()
        assert bits_of(back) == bits_of(tensor)

    def test_strided_tensor_is_an_array_with_its_strides(self) -> None:
        tensor = some(torch.bfloat16, 6, 4).T[::2]
        array = array_of(tensor)
        assert array.ctypes.data == tensor.data_ptr()
        assert array.strides == tuple(2 * stride for stride in tensor.stride())
        assert array.tobytes() == bits_of(tensor)

    def test_parameter_needs_no_detach(self) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        assert array_of(parameter).ctypes.data == parameter.data_ptr()

    def test_conjugate_and_negative_views_are_resolved(self) -> None:
        tensor = torch.tensor([1 + 2j, 3 - 4j])
        assert array_of(tensor.conj()).tolist() == [1 - 2j, 3 + 4j]
        assert array_of(tensor.conj().imag).tolist() == [-2, 4]

    @pytest.mark.parametrize(
        ("array", "tensor"),
        [
            (np.arange(6, dtype=">f4"), torch.arange(6, dtype=torch.float32)),
            (np.arange(6)[::-1], torch.arange(5, -1, -1)),
            (np.frombuffer(bytes(range(4)), np.uint8), torch.arange(4, dtype=torch.uint8)),
        ],
        ids=["big-endian", "reversed", "read-only"],
    )
    @pytest.mark.filterwarnings("error")
    def test_array_that_torch_cannot_show_is_copied(self, array: np.ndarray[Any, Any], tensor: torch.Tensor) -> None:
        assert torch.equal(tensor_of(array), tensor)

    @pytest.mark.parametrize("array", [np.array(["a"]), np.zeros(1, np.longdouble), np.zeros(1, ml_dtypes.int4)])
    def test_array_without_a_type_in_torch_is_refused(self, array: np.ndarray[Any, Any]) -> None:
        with pytest.raises(LeafRefused, match="which torch lacks"):
            tensor_of(array)


UNFIT: dict[str, Any] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "is a tensor that is not dense"),
    "meta": (lambda: torch.empty(3, device="meta"), "is a tensor on the device meta"),
    "complex32": (lambda: torch.zeros(3, dtype=torch.complex32), "is a tensor that numpy cannot show"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "is a"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
class TestUnfit:
    @pytest.mark.parametrize("kind", UNFIT)
    def test_is_refused_with_its_path_by_a_transfer(self, kind: str) -> None:
        make, what = UNFIT[kind]
        with pytest.raises(RequestRefused, match=rf"state\['w'\]\[1\] {what}") as raised:
            pack({"w": [1, make()]})
        assert raised.value.code == "state_unfit"
        assert raised.value.fix

    @pytest.mark.parametrize("kind", UNFIT)
    def test_is_refused_with_its_name_by_a_save(self, kind: str, tmp_path: Path) -> None:
        make, what = UNFIT[kind]
        with pytest.raises(CheckpointException, match=f"w/#1 {what}") as raised:
            fc.save(tmp_path / "a", {"w": [1, make()]})
        assert raised.value.code == "checkpoint_value_unsupported"


class TestTransfer:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_tensors_arrive_in_place_and_bit_for_bit(self, dtype: torch.dtype) -> None:
        state = {"a": some(dtype, 3, 5), "empty": some(dtype, 0, 2), "scalar": some(dtype)}
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        before = {name: (tensor, tensor.data_ptr()) for name, tensor in into.items()}
        transferred(state, into)
        for name, (tensor, pointer) in before.items():
            assert into[name] is tensor
            assert tensor.data_ptr() == pointer
            assert bits_of(tensor) == bits_of(state[name])

    def test_dense_tensors_are_sent_from_their_own_memory(self) -> None:
        state = {"w": torch.nn.Parameter(torch.ones(1000)), "b": some(torch.bfloat16, 10, 10)}
        sent = [np.frombuffer(part, np.uint8).ctypes.data for part in pack(state).parts]
        assert sent == [state["w"].data_ptr(), state["b"].data_ptr()]

    def test_tensors_that_the_receiver_lacks_are_made(self) -> None:
        state = {"w": some(torch.bfloat16, 3), "inner": [{"x": torch.tensor(7)}], "a": np.arange(3)}
        into = transferred(state, {})
        assert bits_of(into["w"]) == bits_of(state["w"])
        assert into["inner"][0]["x"].item() == 7
        assert isinstance(into["a"], np.ndarray)

    def test_tensor_of_another_shape_is_replaced_unless_it_is_trained(self) -> None:
        old = torch.zeros(2)
        assert transferred({"w": torch.ones(3)}, {"w": old})["w"].tolist() == [1, 1, 1]
        assert old.tolist() == [0, 0]
        with pytest.raises(LeafRefused, match=r"is torch.float32 \(2,\) here, and torch.float32 \(3,\) in the state"):
            transferred({"w": torch.ones(3)}, {"w": torch.nn.Parameter(old)})

    def test_strided_and_trained_tensors_are_filled_in_place(self) -> None:
        base = torch.zeros(4, 6)
        into = {"t": base.T, "leaf": torch.zeros(3, requires_grad=True)}
        leaf = into["leaf"]
        transferred({"t": torch.arange(24.0).reshape(6, 4), "leaf": torch.ones(3)}, into)
        assert torch.equal(base, torch.arange(24.0).reshape(6, 4).T)
        assert into["leaf"] is leaf
        assert leaf.is_leaf
        assert leaf.requires_grad
        assert leaf.tolist() == [1, 1, 1]

    def test_tied_tensors_are_sent_once(self) -> None:
        embedding, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        head.weight = embedding.weight
        model = torch.nn.Sequential(embedding, head)
        assert len(pack({"model": model}).parts) == 1
        arrived = transferred({"values": model.state_dict()}, {})["values"]
        assert arrived["0.weight"].data_ptr() == arrived["1.weight"].data_ptr()

    def test_copy_of_a_state_restores_it(self) -> None:
        model = torch.nn.BatchNorm1d(3)
        state: dict[str, Any] = {"model": model, "w": torch.ones(3, requires_grad=True)}
        restore = copy_of(state)
        model(torch.randn(8, 3))
        with torch.no_grad():
            state["w"].zero_()
        restore()
        assert model.num_batches_tracked.item() == 0
        assert model.running_mean.tolist() == [0, 0, 0]
        assert state["w"].tolist() == [1, 1, 1]

    def test_another_model_is_refused(self) -> None:
        packed = pack({"model": torch.nn.Linear(3, 2)})
        arriving = Arriving(packed.head)
        with pytest.raises(RuntimeError, match="size mismatch"):
            arriving.adopt({"model": torch.nn.Linear(4, 2)})


class TestCheckpoints:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_tensors_are_loaded_into_their_own_memory(self, dtype: torch.dtype, tmp_path: Path) -> None:
        state = {"a": some(dtype, 3, 5), "empty": some(dtype, 0, 2), "scalar": some(dtype)}
        fc.save(tmp_path / "a", state)
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        pointers = [tensor.data_ptr() for tensor in into.values()]
        loaded = fc.load(tmp_path / "a", into=into)
        for name, tensor in into.items():
            assert loaded[name] is tensor
            assert bits_of(tensor) == bits_of(state[name])
        assert [tensor.data_ptr() for tensor in into.values()] == pointers

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_view_gives_arrays_that_become_tensors(self, dtype: torch.dtype, tmp_path: Path) -> None:
        state = {"a": some(dtype, 3, 5)}
        fc.save(tmp_path / "a", state)
        with fc.view(tmp_path / "a") as view:
            assert bits_of(tensor_of(view["a"])) == bits_of(state["a"])
            assert bits_of(tensor_of(view.mapped("a"))) == bits_of(state["a"])

    def test_strided_tensors_and_parameters_are_loaded_in_place(self, tmp_path: Path) -> None:
        values = torch.arange(24.0).reshape(6, 4)
        fc.save(tmp_path / "a", {"t": values, "p": torch.ones(3, requires_grad=True)})
        base, parameter = torch.zeros(4, 6), torch.nn.Parameter(torch.zeros(3))
        fc.load(tmp_path / "a", into={"t": base.T, "p": parameter})
        assert torch.equal(base.T, values)
        assert parameter.tolist() == [1, 1, 1]
        assert parameter.is_leaf

    def test_module_with_tied_weights_is_loaded(self, tmp_path: Path) -> None:
        def make() -> torch.nn.Module:
            embedding, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
            head.weight = embedding.weight
            return torch.nn.Sequential(embedding, head)

        saved, model = make(), make()
        fc.save(tmp_path / "a", {"model": saved})
        fc.load(tmp_path / "a", into={"model": model})
        assert torch.equal(model[0].weight, saved[0].weight)
        assert model[0].weight is model[1].weight

    def test_module_of_another_shape_is_refused_before_it_changes(self, tmp_path: Path) -> None:
        fc.save(tmp_path / "a", {"model": torch.nn.Linear(3, 2)})
        model = torch.nn.Linear(4, 2)
        before = [bits_of(parameter) for parameter in model.parameters()]
        with pytest.raises(CheckpointException, match=r"model/weight is float32 \(2, 3\) in the checkpoint"):
            fc.load(tmp_path / "a", into={"model": model})
        assert [bits_of(parameter) for parameter in model.parameters()] == before

    def test_module_that_lacks_a_layer_is_refused(self, tmp_path: Path) -> None:
        fc.save(tmp_path / "a", {"model": torch.nn.Linear(3, 2)})
        with pytest.raises(CheckpointException, match="model/bias is not in the state"):
            fc.load(tmp_path / "a", into={"model": torch.nn.Linear(3, 2, bias=False)})
        with pytest.raises(CheckpointException, match="model/weight is not in the state"):
            fc.load(tmp_path / "a", into={"model": torch.nn.ReLU()})

    def test_incremental_saves_in_the_background_stage_tensors(self, tmp_path: Path) -> None:
        state = {"w": some(torch.bfloat16, 1000), "fixed": some(torch.float32, 1 << 20)}
        with fc.Checkpoints(tmp_path, incremental=True, in_background=True) as checkpoints:
            checkpoints.save(1, state)
            state["w"].zero_()
            checkpoints.save(2, state)
        into = {"w": torch.ones(1000, dtype=torch.bfloat16), "fixed": torch.zeros(1 << 20)}
        with fc.Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.resume(into) == 2
        assert not into["w"].any()
        assert bits_of(into["fixed"]) == bits_of(state["fixed"])
