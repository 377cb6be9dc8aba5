"""Torch's tensors as arrays of a training state, and arrays as tensors.

Invariants:
- A dense tensor in the CPU's memory and its array share that memory.
- The array has every bit of the tensor, and the tensor every bit of the array; types that numpy lacks are those of
  ml_dtypes.
- A DTensor is the part of a global array that this rank holds.
- A tensor that is loaded stays the same object, with its device and its gradient's needs.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forged.leaf_types import Array, Keys, LeafRefused, LeafType
from forged.torch.state import State

if TYPE_CHECKING:
    from forged.checkpoint.model import ShardedArray


class _Bits(NamedTuple):
    """A type that numpy lacks: the type of torch, and of numpy, that has its bits."""

    here: torch.dtype
    there: np.dtype[Any]


_BITS_OF_SIZE = {1: _Bits(torch.uint8, np.dtype(np.uint8)), 2: _Bits(torch.int16, np.dtype(np.int16))}
_EXTENDED = {
    getattr(torch, name): np.dtype(getattr(ml_dtypes, name))
    for name in (
        "bfloat16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name) and hasattr(ml_dtypes, name)
}
"""The types of ml_dtypes that torch has."""
_TORCH_TYPE = {there: here for here, there in _EXTENDED.items()}


# Tensors as arrays.


def array_of(tensor: torch.Tensor) -> Array:
    """The elements of a tensor that is no DTensor; on its own memory if it is dense and on the CPU."""
    _require_dense(tensor)
    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    plain = plain.resolve_conj().resolve_neg()
    if (there := _EXTENDED.get(plain.dtype)) is not None:
        found: Array = plain.view(_BITS_OF_SIZE[there.itemsize].here).numpy().view(there)
        return found
    try:
        array: Array = plain.numpy()
    except (TypeError, RuntimeError) as error:
        raise LeafRefused(f"is a tensor that numpy cannot show: {error}", "save it as a tensor of bytes") from error
    return array


def _require_dense(tensor: torch.Tensor) -> None:
    if is_traceable_wrapper_subclass(tensor):
        raise LeafRefused(f"is a {type(tensor).__name__}", "save the tensors that it consists of")
    if tensor.is_meta:
        raise LeafRefused(
            "is a tensor on the device meta, which has no elements", "call to_empty() of its module first"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise LeafRefused("is a tensor that is not dense", "save its indices and its values as dense tensors")
    if tensor.is_quantized:
        raise LeafRefused(f"is a quantized tensor ({tensor.dtype})", "save its int_repr(), scale and zero point")


def _part_of(tensor: Any) -> ShardedArray:
    """The part of a DTensor that this rank holds."""
    from forged.checkpoint.model import ShardedArray

    _require_one_box(tensor)
    shape = tuple(tensor.shape)
    local = local_of(tensor)
    if not local.numel():
        # Also where this rank has no part of the mesh, so that the local tensor has another number of axes.
        nothing = (0,) * len(shape)
        return ShardedArray(array_of(local).reshape(-1)[:0].reshape(nothing), shape, nothing)
    [chunk] = tensor.__create_chunk_list__()
    return ShardedArray(array_of(local), shape, tuple(chunk.offsets))


def _require_one_box(tensor: Any) -> None:
    """Refuse a DTensor whose local elements are no box of the global array."""
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise LeafRefused(
                "is a DTensor that is still to be reduced", "call redistribute() to Replicate() or Shard()"
            )
        if (factor := getattr(placement, "split_factor", None)) is None:
            continue
        # FSDP over tensor parallelism: a later axis of the mesh divides each stride into the boxes of its ranks.
        sizes = {
            number: tensor.device_mesh.size(number)
            for number, other in enumerate(tensor.placements)
            if getattr(other, "dim", None) == placement.dim
        }
        later = math.prod(size for number, size in sizes.items() if number > axis)
        if factor != later or tensor.shape[placement.dim] % math.prod(sizes.values()):
            raise LeafRefused(
                f"is a DTensor with {placement}, of which a rank has several pieces",
                "give its axis a size that the ranks divide evenly",
            )


def _is_distributed(value: Any) -> bool:
    """Whether the value is a DTensor; there is none before the module that defines it is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """A tensor itself, or the local one of a DTensor, without its history of operations."""
    if not _is_distributed(tensor):
        return tensor.detach()
    local = tensor.detach().to_local()
    # The result of a collective that is still under way.
    return local.wait() if hasattr(local, "wait") else local


def _to_array(value: torch.Tensor) -> Array | ShardedArray:
    return _part_of(value) if _is_distributed(value) else array_of(value)


# Arrays as tensors.


def tensor_of(array: Array) -> torch.Tensor:
    """A tensor with the elements of an array; on its memory if that is writable and dense."""
    if not array.flags.writeable or not array.dtype.isnative or min(array.strides, default=0) < 0:
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    if (here := _TORCH_TYPE.get(array.dtype)) is not None:
        found: torch.Tensor = torch.from_numpy(array.view(_BITS_OF_SIZE[array.itemsize].there)).view(here)
        return found
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise LeafRefused(f"is an array of {array.dtype}, which torch lacks", "load it as a numpy array") from None


def _from_array(array: Array | ShardedArray, have: Any) -> Any:
    """The tensor that the state has, with the array's elements; a new one if it has none, or another shape or type."""
    if not isinstance(array, np.ndarray):
        _require_same_part(array, have)
        local = array.local
    elif have is None:
        return tensor_of(array)
    else:
        local = array
    target = local_of(have)
    if not target.numel() or _is_on(local, target):
        return have
    values = tensor_of(local)
    if (values.dtype, values.shape) != (target.dtype, target.shape):
        return _instead_of(have, values)
    with torch.no_grad():
        target.copy_(values)
    return have


def _require_same_part(part: ShardedArray, have: Any) -> None:
    here = _part_of(have) if _is_distributed(have) else None
    there = (part.global_shape, part.offset, part.local.shape)
    if here is None or (here.global_shape, here.offset, here.local.shape) != there:
        raise LeafRefused(
            f"is the part {part.local.shape} at {part.offset} of a DTensor {part.global_shape}",
            "give it to the same rank of a mesh of the same shape",
        )


def _instead_of(have: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if have.requires_grad or _is_distributed(have):
        raise LeafRefused(
            f"is {have.dtype} {tuple(have.shape)} here, and {values.dtype} {tuple(values.shape)} in the state",
            "build the same model as the one that was saved",
        )
    return values.to(have.device)


def _is_on(array: Array, tensor: torch.Tensor) -> bool:
    """Whether the array is the tensor's own memory."""
    return tensor.device.type == "cpu" and array.ctypes.data == tensor.data_ptr() and not tensor.is_conj()


LEAF_TYPES = (LeafType(lambda value: isinstance(value, torch.Tensor), _to_array, _from_array),)


# What an object takes that its state lacks.


def blank_for(owner: Any, keys: Keys, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """A tensor to load an array into that the state of `owner` lacks at `keys`; None if it may not get one.

    The state of an optimizer is empty before its first step.
    """
    if isinstance(owner, torch.nn.Module):
        return None
    if isinstance(owner, State):
        part = owner.part_at(keys[0]) if keys else None
        return None if part is None else blank_for(part, keys[1:], dtype, shape)
    if isinstance(owner, torch.optim.Optimizer):
        parameter = _parameter(owner, keys)
        if _is_distributed(parameter) and tuple(parameter.shape) == shape:
            return torch.empty_like(parameter.detach(), dtype=_torch_type(dtype))
    blank = np.empty(shape, dtype)
    try:
        return tensor_of(blank)
    except LeafRefused:
        # It was no tensor when it was saved.
        return blank


def _parameter(optimizer: torch.optim.Optimizer, keys: Keys) -> Any:
    """The parameter that a value of an optimizer's state belongs to; None if it belongs to none."""
    if len(keys) < 2 or keys[0] != "state" or not isinstance(keys[1], int):
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return parameters[keys[1]] if 0 <= keys[1] < len(parameters) else None


def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return tensor_of(np.empty(0, dtype)).dtype
