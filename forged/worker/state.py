"""A worker's training state, as bytes for another worker and back.

Law: what arrives is what was there, bit for bit, with the same keys, shapes and types. Arrays are not copied into a
message: the head describes them, and their memory is read and written where it is. Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from forged.errors import PeerError, RequestRefused, Unavailable
from forged.worker.arrays import name_of

Array = npt.NDArray[Any]

ARRAY, SCALAR, TUPLE, LIST, DICT, PLAIN = "a", "s", "t", "l", "d", "p"
DEPTH_MAX = 64
_PLAIN: tuple[type[Any], ...] = (bool, int, float, str, bytes)


@runtime_checkable
class Stateful(Protocol):
    """What brings its state by itself."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """An array without its elements."""

    dtype: str
    shape: tuple[int, ...]


class Head(msgspec.Struct, frozen=True):
    """A state without the elements of its arrays; `tree` refers to `arrays` by number."""

    tree: Any
    arrays: list[ArraySpec]


@dataclass(frozen=True, slots=True)
class Packed:
    """A state on its way out: its head, and the memory of its arrays."""

    head: bytes
    parts: list[memoryview]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Head).decode


def pack(state: Any) -> Packed:
    """Describe a state; its arrays must not change until they were sent."""
    arrays: list[Array] = []
    tree = _describe(_values(state), arrays, "state", 0)
    specs = [ArraySpec(name_of(array.dtype), array.shape) for array in arrays]
    try:
        head = _encode(Head(tree, specs))
    except OverflowError as error:
        raise RequestRefused("state_unfit", f"a number in state is too large: {error}", "keep it as text") from error
    return Packed(head, [_memory(array) for array in arrays])


class Arriving:
    """A state on its way in: `parts` is where its bytes go, and `adopt` makes it the worker's."""

    def __init__(self, head: bytes) -> None:
        try:
            self._head = _decode(head)
            self._arrays = [_room_for(spec) for spec in self._head.arrays]
            # Now, and not when all has arrived.
            self._build(self._head.tree, 0)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise PeerError("state_invalid", f"a state cannot be read: {error}") from error
        except MemoryError as error:
            raise Unavailable("state_too_large", f"there is no memory for the state: {error}", "free some") from error
        self.parts = [_memory(array) for array in self._arrays]

    def adopt(self, state: Any) -> None:
        """Let a state become the one that has arrived; arrays that fit are filled where they are."""
        _adopted(state, self._build(self._head.tree, 0))

    def _build(self, node: Any, depth: int) -> Any:
        try:
            kind, content = node
        except (TypeError, ValueError) as error:
            raise PeerError("state_invalid", "a state's description is none") from error
        if depth > DEPTH_MAX:
            raise PeerError("state_invalid", "a state is nested too deep")
        build: Mapping[str, Callable[[], Any]] = {
            ARRAY: lambda: self._arrays[content],
            SCALAR: lambda: self._arrays[content][()],
            PLAIN: lambda: content,
            LIST: lambda: [self._build(one, depth + 1) for one in content],
            TUPLE: lambda: tuple(self._build(one, depth + 1) for one in content),
            DICT: lambda: {key: self._build(one, depth + 1) for key, one in content},
        }
        try:
            return build[kind]()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PeerError("state_invalid", f"a state's description is none: {error!r}") from error


def copy_of(state: Any) -> Callable[[], None]:
    """Remember a state; what is returned brings it back."""
    packed = pack(state)
    kept = [bytes(part) for part in packed.parts]

    def restore() -> None:
        arriving = Arriving(packed.head)
        for target, source in zip(arriving.parts, kept, strict=True):
            target[:] = source
        arriving.adopt(state)

    return restore


def _values(state: Any) -> Any:
    if isinstance(state, Stateful):
        return state.state_dict()
    if isinstance(state, MutableMapping):
        return state
    raise RequestRefused(
        "state_unfit",
        f"state is a {type(state).__name__}",
        "give an object with state_dict() and load_state_dict(), or a dict of such objects, arrays and plain values",
    )


def _describe(value: Any, arrays: list[Array], where: str, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise RequestRefused("state_unfit", f"{where} is nested too deep", f"nest at most {DEPTH_MAX} levels")
    if isinstance(value, (np.ndarray, np.generic)):
        kind = ARRAY if isinstance(value, np.ndarray) else SCALAR
        return (kind, _keep(np.asanyarray(value), arrays, where))
    if value is None or isinstance(value, _PLAIN):
        return (PLAIN, _plain(value))
    if isinstance(value, Stateful):
        return _describe(value.state_dict(), arrays, where, depth + 1)
    if isinstance(value, Mapping):
        return (
            DICT,
            [(_key(key, where), _describe(one, arrays, f"{where}[{key!r}]", depth + 1)) for key, one in value.items()],
        )
    if isinstance(value, (list, tuple)):
        kind = TUPLE if isinstance(value, tuple) else LIST
        return (kind, [_describe(one, arrays, f"{where}[{n}]", depth + 1) for n, one in enumerate(value)])
    raise RequestRefused(
        "state_unfit", f"{where} is a {type(value).__name__}", "keep arrays, numbers, texts, bytes and None in it"
    )


def _plain(value: Any) -> Any:
    # What is derived from a plain type, such as the number of a step, arrives as what it is made of.
    return next((plain(value) for plain in _PLAIN if isinstance(value, plain)), None)


def _key(key: Any, where: str) -> Any:
    if key is not None and (not isinstance(key, _PLAIN) or isinstance(key, np.generic)):
        raise RequestRefused("state_unfit", f"{where} has a {type(key).__name__} for a key", "use numbers and texts")
    return _plain(key)


def _keep(array: Array, arrays: list[Array], where: str) -> int:
    """The number under which the array is sent."""
    if array.dtype.hasobject or array.dtype.names or isinstance(array, np.ma.MaskedArray):
        raise RequestRefused("state_unfit", f"{where} is an array of {array.dtype}", "keep arrays of numbers in it")
    # A slice has no memory of its own that could be read as a whole.
    arrays.append(np.asarray(array) if array.flags.c_contiguous else np.ascontiguousarray(array))
    return len(arrays) - 1


def _room_for(spec: ArraySpec) -> Array:
    """An array for what will arrive."""
    dtype = np.dtype(spec.dtype)
    if dtype.hasobject or dtype.names:
        raise ValueError(f"an array of {dtype}")
    return np.empty(spec.shape, dtype)


def _memory(array: Array) -> memoryview:
    """The bytes of an array, where they are."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(bytearray())


def _adopted(present: Any, arrived: Any) -> Any:
    """What has arrived; in the place of what is there, as far as that can take it."""
    if isinstance(present, Stateful):
        present.load_state_dict(arrived)
        return present
    if isinstance(present, MutableMapping) and isinstance(arrived, Mapping):
        values = {key: _adopted(present.get(key), value) for key, value in arrived.items()}
        if list(present) != list(values):
            # The order of keys is part of what was there.
            present.clear()
        present.update(values)
        return present
    if isinstance(arrived, tuple) and isinstance(present, tuple) and len(present) == len(arrived):
        return tuple(_adopted(old, new) for old, new in zip(present, arrived, strict=True))
    if isinstance(arrived, list) and isinstance(present, list) and len(present) == len(arrived):
        present[:] = [_adopted(old, new) for old, new in zip(present, arrived, strict=True)]
        return present
    if _fits(present, arrived):
        present[...] = arrived
        return present
    return arrived


def _fits(present: Any, arrived: Any) -> bool:
    """Whether the elements can be put where those of the present array are."""
    arrays = isinstance(present, np.ndarray) and isinstance(arrived, np.ndarray)
    return arrays and present.shape == arrived.shape and present.dtype == arrived.dtype and present.flags.writeable
