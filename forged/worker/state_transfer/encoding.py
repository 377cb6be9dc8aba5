"""The encoding of a training state for a state transfer.

Invariants:
- The received state equals the sent one bit for bit, with the same keys, shapes and types.
- Arrays and long `bytes` are not copied into a message: the head describes them, and their memory is sent and received
  in place.
- A state that cannot be transferred is refused when it is packed, with the path of the value. Nothing is unpickled.
- Leaves that share all of their memory are sent once, and share it where they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from forged.errors import PeerError, RequestRefused, Unavailable
from forged.leaf_types import Keys, LeafRefused, PerRank, leaf_type_for, package_of, provider_of
from forged.worker.collectives.arrays import dtype_named, name_of, travels
from forged.worker.transport.peer_messages import HEAD_BYTES_MAX, PARTS_MAX

Array = npt.NDArray[Any]

ARRAY, SCALAR, BYTES, TUPLE, LIST, DICT, PLAIN, LEAF = "a", "s", "b", "t", "l", "d", "p", "x"
DEPTH_MAX = 64
BYTES_IN_HEAD_MAX = 4096
"""Longer `bytes` are sent as parts, like arrays."""
_PLAIN: tuple[type[Any], ...] = (bool, int, float, str, bytes)


@runtime_checkable
class StateDictHolder(Protocol):
    """An object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """An array without its elements."""

    dtype: str
    shape: tuple[int, ...]


class LeafSpec(msgspec.Struct, frozen=True, array_like=True):
    """A leaf of a package with leaf types."""

    package: str
    array: int
    global_shape: tuple[int, ...] | None = None
    """Of the global array of which the leaf is a part; None if it is none."""
    offset: tuple[int, ...] = ()


class Head(msgspec.Struct, frozen=True):
    """A state without the elements of its arrays; `tree` refers to `arrays` by number."""

    tree: Any
    arrays: list[ArraySpec]


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed state: its head, and the memory of its arrays."""

    head: bytes
    parts: list[memoryview]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf that has arrived as an array, or as the part of one."""

    package: str
    local: Array
    global_shape: tuple[int, ...] | None
    offset: tuple[int, ...]

    def put_into(self, present: Any) -> Any:
        """The leaf, in the present value if that is one; a new value without it."""
        [leaf_type, *_] = provider_of(self.package).LEAF_TYPES
        have = present if leaf_type.accepts(present) else None
        return leaf_type.from_array(self.local if self.global_shape is None else self, have)

    def for_object(self, owner: Any, keys: Keys, present: Callable[[], Any]) -> Any:
        """The leaf for the state of `owner`, which is `present`: a new value, but a part goes into the present one."""
        if self.global_shape is None:
            return self.put_into(None)
        have = _value_at(present(), keys)
        if have is None:
            have = provider_of(self.package).blank_for(owner, keys, self.local.dtype, self.global_shape)
        return self.put_into(have)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Head).decode


def pack(state: Any) -> Packed:
    """Pack a state; its arrays must not change until they have been sent."""
    arrays = _Arrays()
    tree = _describe(_values(state), arrays, "state", 0)
    specs = [ArraySpec(name_of(array.dtype), array.shape) for array in arrays]
    try:
        head = _encode(Head(tree, specs))
    except OverflowError as error:
        raise RequestRefused("state_unfit", f"a number in state is too large: {error}", "keep it as text") from error
    except UnicodeEncodeError as error:
        raise _unwritable(tree) from error
    if len(head) > HEAD_BYTES_MAX or len(arrays) > PARTS_MAX:
        raise _too_large(tree, len(head), len(arrays))
    return Packed(head, [_memory(array) for array in arrays])


class Arriving:
    """A state that is being received: `parts` take its bytes, and `adopt` applies it to the worker's state."""

    def __init__(self, head: bytes) -> None:
        try:
            self._head = _decode(head)
            self._arrays = [_room_for(spec) for spec in self._head.arrays]
            # Invalid descriptions are refused now, and not when all parts have arrived.
            self._build(self._head.tree, 0, self._arrays.__getitem__)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, PeerError) as error:
            raise PeerError("state_invalid", f"a state cannot be read: {error}") from error
        except MemoryError as error:
            raise Unavailable("state_too_large", f"there is no memory for the state: {error}", "free memory") from error
        self.parts = [_memory(array) for array in self._arrays]

    def adopt(self, state: Any) -> None:
        """Make a state equal to the received one; arrays that fit are filled in place."""
        # Bytes that the description names several times are made once.
        bytes_of = cache(lambda number: self._arrays[number].tobytes())
        _adopted(state, self._build(self._head.tree, 0, bytes_of))

    def _build(self, node: Any, depth: int, bytes_of: Callable[[Any], Any]) -> Any:
        try:
            kind, content = node
        except (TypeError, ValueError) as error:
            raise PeerError("state_invalid", "a state's description is invalid") from error
        if depth > DEPTH_MAX:
            raise PeerError("state_invalid", "a state is nested too deep")
        build: Mapping[str, Callable[[], Any]] = {
            ARRAY: lambda: self._arrays[content],
            SCALAR: lambda: self._arrays[content][()],
            BYTES: lambda: bytes_of(content),
            LEAF: lambda: self._leaf(msgspec.convert(content, LeafSpec)),
            PLAIN: lambda: content,
            LIST: lambda: [self._build(one, depth + 1, bytes_of) for one in content],
            TUPLE: lambda: tuple(self._build(one, depth + 1, bytes_of) for one in content),
            DICT: lambda: {key: self._build(one, depth + 1, bytes_of) for key, one in content},
        }
        try:
            return build[kind]()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PeerError("state_invalid", f"a state's description is invalid: {error!r}") from error

    def _leaf(self, spec: LeafSpec) -> _Leaf:
        try:
            provider_of(spec.package)
        except ImportError as error:
            raise PeerError("state_invalid", f"a state has values of {spec.package}: {error}", "install it") from error
        return _Leaf(spec.package, self._arrays[spec.array], spec.global_shape, spec.offset)


def copy_of(state: Any) -> Callable[[], None]:
    """Copy a state; returns a function that restores it."""
    packed = pack(state)
    kept = [bytes(part) for part in packed.parts]

    def restore() -> None:
        arriving = Arriving(packed.head)
        for target, source in zip(arriving.parts, kept, strict=True):
            target[:] = source
        arriving.adopt(state)

    return restore


def _values(state: Any) -> Any:
    if isinstance(state, StateDictHolder):
        return _dict_of(state, "state")
    if isinstance(state, MutableMapping):
        return state
    raise RequestRefused(
        "state_unfit",
        f"state must be a dict or have state_dict() and load_state_dict(), got a {type(state).__name__}",
        "give an object with state_dict() and load_state_dict(), or a dict of such objects, arrays and plain values",
    )


def _dict_of(holder: StateDictHolder, where: str) -> Mapping[str, Any]:
    try:
        return holder.state_dict()
    except Exception as error:
        error.add_note(f"raised by state_dict() of {where} (class {type(holder).__name__})")
        raise


class _Arrays(list[Array]):
    """The arrays of a state that is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers_of_leaves: dict[Any, int] = {}
        """By the memory of a leaf, its array's number."""


def _describe(value: Any, arrays: _Arrays, where: str, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise RequestRefused("state_unfit", f"{where} is nested too deep", f"nest at most {DEPTH_MAX} levels")
    if isinstance(value, (np.ndarray, np.generic)):
        kind = ARRAY if isinstance(value, np.ndarray) else SCALAR
        return (kind, _keep(np.asanyarray(value), arrays, where))
    if isinstance(value, bytes) and len(value) > BYTES_IN_HEAD_MAX:
        return (BYTES, _keep(np.frombuffer(value, np.uint8), arrays, where))
    if value is None or isinstance(value, _PLAIN):
        return (PLAIN, _plain(value))
    if isinstance(value, PerRank):
        return _describe(value.value, arrays, where, depth + 1)
    if (leaf := _leaf(value, arrays, where)) is not None:
        return (LEAF, leaf)
    if isinstance(value, StateDictHolder):
        return _describe(_dict_of(value, where), arrays, where, depth + 1)
    if isinstance(value, Mapping):
        return (
            DICT,
            [(_key(key, where), _describe(one, arrays, f"{where}[{key!r}]", depth + 1)) for key, one in value.items()],
        )
    if isinstance(value, (list, tuple)):
        kind = TUPLE if isinstance(value, tuple) else LIST
        return (kind, [_describe(one, arrays, f"{where}[{n}]", depth + 1) for n, one in enumerate(value)])
    raise RequestRefused(
        "state_unfit", f"{where} is a {type(value).__name__}", "keep only arrays, numbers, texts, bytes and None in it"
    )


def _leaf(value: Any, arrays: _Arrays, where: str) -> LeafSpec | None:
    """The description of a leaf, whose array is added to the parts; None if the value is none."""
    package, leaf_type = package_of(value), leaf_type_for(value)
    if package is None or leaf_type is None:
        return None
    try:
        array = leaf_type.to_array(value)
    except LeafRefused as error:
        raise RequestRefused("state_unfit", f"{where} {error.what}", error.fix) from error
    if isinstance(array, np.ndarray):
        return LeafSpec(package, _keep_leaf(array, arrays, where))
    return LeafSpec(package, _keep_leaf(array.local, arrays, where), array.global_shape, array.offset)


def _keep_leaf(array: Array, arrays: _Arrays, where: str) -> int:
    memory = (array.ctypes.data, array.shape, array.strides, array.dtype) if array.size else object()
    if memory not in arrays.numbers_of_leaves:
        arrays.numbers_of_leaves[memory] = _keep(array, arrays, where)
    return arrays.numbers_of_leaves[memory]


def _plain(value: Any) -> Any:
    # A value of a derived type, such as `Step`, is sent as its plain type.
    return next((plain(value) for plain in _PLAIN if isinstance(value, plain)), None)


def _key(key: Any, where: str) -> Any:
    if key is not None and (not isinstance(key, _PLAIN) or isinstance(key, np.generic)):
        raise RequestRefused("state_unfit", f"{where} has a {type(key).__name__} for a key", "use numbers and texts")
    return _plain(key)


def _keep(array: Array, arrays: _Arrays, where: str) -> int:
    """Add an array to the parts; returns its number."""
    if not travels(array.dtype) or isinstance(array, np.ma.MaskedArray):
        raise RequestRefused("state_unfit", f"{where} is an array of {array.dtype}", "keep arrays of numbers in it")
    # A slice is not contiguous, and is copied.
    arrays.append(np.asarray(array) if array.flags.c_contiguous else np.ascontiguousarray(array))
    return len(arrays) - 1


def _texts(node: Any, where: str) -> Iterator[tuple[str, str]]:
    """Every text of a described state, and its path."""
    kind, content = node
    if kind == DICT:
        for key, one in content:
            if isinstance(key, str):
                yield f"a key of {where}", key
            yield from _texts(one, f"{where}[{key!r}]")
    elif kind in (LIST, TUPLE):
        for number, one in enumerate(content):
            yield from _texts(one, f"{where}[{number}]")
    elif isinstance(content, str):
        yield where, content


def _size_of(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _unwritable(tree: Any) -> RequestRefused:
    where = next((where for where, text in _texts(tree, "state") if not _is_unicode(text)), "state")
    return RequestRefused(
        "state_unfit",
        f"{where} is a text that is not Unicode",
        "keep it as bytes: `text.encode(errors='surrogateescape')`",
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_large(tree: Any, head_bytes: int, parts: int) -> RequestRefused:
    if parts > PARTS_MAX:
        what = f"state has {parts} arrays and `bytes` values of over {BYTES_IN_HEAD_MAX} bytes; limit {PARTS_MAX}"
        return RequestRefused("state_too_large", what, "merge small arrays into larger ones")
    what = f"state has {head_bytes} bytes of texts, numbers and keys, beside its arrays; limit {HEAD_BYTES_MAX}"
    longest = max(((_size_of(text), where) for where, text in _texts(tree, "state")), default=None)
    most = "" if longest is None else f"; the largest text, {longest[1]}, has {longest[0]}"
    return RequestRefused("state_too_large", what + most, "keep long texts as bytes, and many numbers as an array")


def _room_for(spec: ArraySpec) -> Array:
    """An array that takes the received elements."""
    return np.empty(spec.shape, dtype_named(spec.dtype))


def _memory(array: Array) -> memoryview:
    """The bytes of an array, without a copy."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(bytearray())


def _adopted(present: Any, arrived: Any) -> Any:
    """The received value, put into the present one in place as far as that fits."""
    if isinstance(present, PerRank):
        return PerRank(_adopted(present.value, arrived))
    if isinstance(arrived, _Leaf):
        return arrived.put_into(present)
    if isinstance(present, StateDictHolder):
        present.load_state_dict(_for_object(arrived, present))
        return present
    if isinstance(present, MutableMapping) and isinstance(arrived, Mapping):
        values = {key: _adopted(present.get(key), value) for key, value in arrived.items()}
        if list(present) != list(values):
            # The order of the keys is part of the state.
            present.clear()
        present.update(values)
        return present
    if isinstance(arrived, tuple) and isinstance(present, tuple) and len(present) == len(arrived):
        # A named tuple is sent as a plain one, and made again from its fields in order.
        make = getattr(type(present), "_make", tuple)
        return make(_adopted(old, new) for old, new in zip(present, arrived, strict=True))
    if isinstance(arrived, list) and isinstance(present, list) and len(present) == len(arrived):
        present[:] = [_adopted(old, new) for old, new in zip(present, arrived, strict=True)]
        return present
    if _fits(present, arrived):
        present[...] = arrived
        return present
    return _for_object(arrived, None)


def _for_object(arrived: Any, owner: Any) -> Any:
    """The received value, with leaves for the state of `owner`."""
    present = cache(lambda: owner.state_dict() if isinstance(owner, StateDictHolder) else {})

    def converted(value: Any, keys: Keys) -> Any:
        if isinstance(value, _Leaf):
            return value.for_object(owner, keys, present)
        if isinstance(value, dict):
            return {key: converted(one, (*keys, key)) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(converted(one, (*keys, n)) for n, one in enumerate(value))
        return value

    return converted(arrived, ())


def _value_at(state: Any, keys: Keys) -> Any:
    """The value that a state has at these keys; None if it has none."""
    for key in keys:
        try:
            state = state[key]
        except (LookupError, TypeError):
            return None
    return state


def _fits(present: Any, arrived: Any) -> bool:
    """Whether the received elements can be written into the present array."""
    arrays = isinstance(present, np.ndarray) and isinstance(arrived, np.ndarray)
    return arrays and present.shape == arrived.shape and present.dtype == arrived.dtype and present.flags.writeable
