"""The pickles of torch's files: tensors by their storages, and plain values. Nothing of torch is imported or called.

Invariants:
- Only dicts, tensors and what describes them are read; every other class is refused by name.
- A tensor lies within its storage; what it refers to is checked before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forged.checkpoint.errors import CheckpointException, corrupted
from forged.checkpoint.format.dtypes import dtype_of
from forged.checkpoint.format.manifest import SIZE_MAX
from forged.checkpoint.model import AXES_MAX
from forged.pickle_reader import Named, PickleRefused, Record, read_pickle

PICKLE_BYTES_MAX = 256 << 20
NODES_MAX = 5_000_000
"""Values of a state; a pickle can name one list many times at little cost."""
DEPTH_MAX = 100
STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "BFloat16": "bfloat16",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
"""By the class of a storage without `Storage`, the type of its elements."""
UNTYPED = "torch.storage.UntypedStorage"
DTYPES = {
    **{name: name for name in STORAGES.values()},
    **{name: name for name in ("uint16", "uint32", "uint64")},
    **{f"float8_{name}": f"float8_{name}" for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
}
"""By torch's name of a type without `torch.`, the manifest's."""
_CLASS_OF = {there: f"torch.{name}Storage" for name, there in STORAGES.items()}
SAVE_ANEW = "save the state dicts alone, with torch.save of torch 1.6 or newer"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in a torch file: elements of a storage."""

    storage: str
    storage_bytes: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, as the offset."""
    offset: int

    @property
    def itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie together in C order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return not self.nbytes
            expected *= size
        return True


def refused(file: str, why: str, fix: str = SAVE_ANEW) -> CheckpointException:
    """The error for a file that is no plain state."""
    return corrupted(f"{file} cannot be read: {why}", file, fix, code="checkpoint_file_malformed")


# Reading.


class _Storage(NamedTuple):
    key: str
    dtype: str | None
    """None for bytes, whose type the tensor tells."""
    elements: int


def read_state(data: bytes, file: str) -> Any:
    """The state of a pickle with `TensorRef`s for tensors."""
    try:
        found = read_pickle(data, FUNCTIONS, _storage_of)
    except PickleRefused as error:
        raise refused(file, str(error)) from None
    _require_plain(found, file)
    return found


def _storage_of(reference: Any) -> _Storage:
    kind, named, key, _, count = reference
    if kind != "storage" or not isinstance(named, Named) or not isinstance(key, str) or not _is_count(count):
        raise ValueError("it is no storage of a tensor")
    if named.name == UNTYPED:
        return _Storage(key, None, count)
    dtype = STORAGES.get(named.name.removeprefix("torch.").removesuffix("Storage"))
    if dtype is None:
        raise ValueError(f"{named.name:.60} is no storage")
    return _Storage(key, dtype, count)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TensorRef:
    """A tensor; the metadata after the flag of its gradient and its hooks says that its bits are changed."""
    if len(rest) > 2 and rest[2]:
        raise ValueError("it is a conjugate or negative view; call resolve_conj() and resolve_neg() before saving it")
    return _checked(storage, getattr(storage, "dtype", None), offset, shape, strides)


def _tensor_of_type(
    storage: Any, offset: Any, shape: Any, strides: Any, gradient: Any, hooks: Any, dtype: Any, *rest: Any
) -> TensorRef:
    """A tensor whose storage has bytes."""
    return _checked(storage, dtype_named(dtype), offset, shape, strides)


def _checked(storage: Any, dtype: str | None, offset: Any, shape: Any, strides: Any) -> TensorRef:
    if not isinstance(storage, _Storage) or dtype is None:
        raise ValueError("it has no storage")
    if not (_are_counts(shape) and _are_counts(strides) and _is_count(offset) and len(shape) == len(strides)):
        raise ValueError("its shape or its strides are invalid")
    if len(shape) > AXES_MAX:
        raise ValueError(f"it has {len(shape)} axes; limit {AXES_MAX}")
    itemsize = dtype_of(dtype).itemsize
    size = storage.elements if storage.dtype is None else storage.elements * dtype_of(storage.dtype).itemsize
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    volume = math.prod(shape)
    if max(size, volume * itemsize) > SIZE_MAX or (volume and (last + 1) * itemsize > size):
        raise ValueError("it lies outside of its storage")
    if volume * itemsize > size:
        raise ValueError("it repeats elements of its storage; call contiguous() before saving it")
    return TensorRef(storage.key, size, dtype, tuple(shape), tuple(strides), offset)


def _is_count(value: Any) -> bool:
    # Numbers of any size would take hours to multiply.
    return type(value) is int and 0 <= value <= SIZE_MAX


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(map(_is_count, values))


def dtype_named(value: Any) -> str:
    """The manifest's name of a type that a pickle names."""
    if not isinstance(value, Named) or value.name.removeprefix("torch.") not in DTYPES:
        raise ValueError(f"its type {getattr(value, 'name', value)!r:.60} is unknown")
    return DTYPES[value.name.removeprefix("torch.")]


def _same(value: Any, *_: Any) -> Any:
    return value


def _tuple_of(values: Any = ()) -> tuple[Any, ...]:
    if not isinstance(values, (tuple, list)):
        raise ValueError("it has no sizes")
    return tuple(values)


def _dict_of(pairs: Any = ()) -> dict[Any, Any]:
    return dict(pairs)


def _not_callable(*_: Any) -> Any:
    raise ValueError("it is no function")


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _dict_of,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_type,
    "torch._utils._rebuild_parameter": _same,
    "torch._utils._rebuild_parameter_with_state": _same,
    "torch.Size": _tuple_of,
    UNTYPED: _not_callable,
    **{f"torch.{name}Storage": _not_callable for name in STORAGES},
    **{f"torch.{name}": _not_callable for name in DTYPES},
}
"""What stands for the functions and classes that a state's pickle may name."""


def _require_plain(state: Any, file: str) -> None:
    """Refuse states with types as values, and those that name their parts too often."""
    waiting: list[tuple[Any, int]] = [(state, 0)]
    count = 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if count > NODES_MAX or depth > DEPTH_MAX:
            raise refused(file, f"it has more than {NODES_MAX:,} values, or {DEPTH_MAX} levels of them")
        if isinstance(value, (Named, Record, _Storage)):
            raise refused(file, f"it has {getattr(value, 'name', 'an object')} as a value")
        if isinstance(value, TensorRef):
            continue
        if isinstance(value, dict):
            waiting += [(one, depth + 1) for one in value.values()]
        elif isinstance(value, (list, tuple)):
            waiting += [(one, depth + 1) for one in value]


# Writing.

LEFT_OUT = object()
"""Stands for a value that a pickle cannot hold."""


class StoredTensor(NamedTuple):
    """A tensor to write: contiguous, alone in its storage."""

    storage: str
    dtype: str
    shape: tuple[int, ...]


class Global(NamedTuple):
    """A class or function to name."""

    module: str
    name: str


class Call(NamedTuple):
    """The result of a call."""

    function: Global
    arguments: tuple[Any, ...]


class Instance(NamedTuple):
    """An object that is made without its constructor, from its state."""

    kind: Global
    state: Any


class Pairs(NamedTuple):
    """A dict with keys of any kind."""

    items: list[tuple[Any, Any]]


class _Outside(NamedTuple):
    """A value outside of the pickle."""

    reference: tuple[Any, ...]


def can_hold(dtype: str) -> bool:
    """Whether torch has this type of elements."""
    return dtype in DTYPES


def encode(value: Any) -> bytes:
    """A pickle of protocol 2, which every version of torch reads, with weights only too."""
    return b"\x80\x02" + b"".join(_encoded(value)) + b"."


def _encoded(value: Any) -> Iterator[bytes]:
    match value:
        case None:
            yield b"N"
        case bool():
            yield b"\x88" if value else b"\x89"
        case int():
            yield _integer(value)
        case float():
            yield b"G" + struct.pack(">d", value)
        case str():
            data = value.encode("utf-8", "surrogatepass")
            yield b"X" + struct.pack("<I", len(data)) + data
        case StoredTensor() | Global() | Call() | Instance() | _Outside():
            yield from _reference(value)
        case _:
            yield from _container(value)


def _reference(value: Any) -> Iterator[bytes]:
    match value:
        case StoredTensor():
            yield from _encoded(_rebuilt(value))
        case Global():
            yield f"c{value.module}\n{value.name}\n".encode()
        case Call():
            yield from _encoded(value.function)
            yield from _encoded(value.arguments)
            yield b"R"
        case Instance():
            yield from _encoded(value.kind)
            yield b")\x81"
            yield from _encoded(value.state)
            yield b"b"
        case _Outside():
            yield from _encoded(value.reference)
            yield b"Q"


def _container(value: Any) -> Iterator[bytes]:
    match value:
        case dict() | Pairs():
            yield b"}("
            for key, one in value.items() if isinstance(value, dict) else value.items:
                yield from _encoded(key)
                yield from _encoded(one)
            yield b"u"
        case tuple():
            yield b"("
            for one in value:
                yield from _encoded(one)
            yield b"t"
        case list():
            yield b"]("
            for one in value:
                yield from _encoded(one)
            yield b"e"
        case _:
            raise TypeError(f"a {type(value).__name__} cannot be pickled")


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) < 256:
        return b"\x8a" + bytes([len(data)]) + data
    return b"\x8b" + struct.pack("<i", len(data)) + data


def _rebuilt(tensor: StoredTensor) -> Call:
    """The call that makes a tensor of its storage."""
    shape = tensor.shape
    strides = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    count, hooks = math.prod(shape), Call(Global("collections", "OrderedDict"), ())
    if (kind := _CLASS_OF.get(tensor.dtype)) is not None:
        storage = _Outside(("storage", Global("torch", kind.removeprefix("torch.")), tensor.storage, "cpu", count))
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, shape, strides, False, hooks))
    untyped = Global("torch.storage", "UntypedStorage")
    storage = _Outside(("storage", untyped, tensor.storage, "cpu", count * dtype_of(tensor.dtype).itemsize))
    dtype = Global("torch", tensor.dtype)
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), (storage, 0, shape, strides, False, hooks, dtype))


def plain_value(value: Any) -> Any:
    """A value of a state as torch's pickles hold it; `LEFT_OUT` if they cannot, such as bytes."""
    if isinstance(value, (np.bool_, np.integer, np.floating)) and value.dtype.name in DTYPES:
        return value.item()
    return value if value is None or type(value) in (bool, int, float, str) else LEFT_OUT
