"""Arrays as values of a collective, and how many become one.

Law: what comes out has the type, the shape and every bit of what went in. A reduction goes over the ranks in their
order, element by element, so its result is the same at every rank and in every run. What numpy cannot add is refused
before anything is sent; nothing is ever unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from forged.errors import PeerError, RequestRefused
from forged.worker.transport.peer_messages import COLLECTIVE_BYTES_MAX, Form, Operation, Value

Array = npt.NDArray[Any]
Given = bytes | bytearray | memoryview | Array | np.generic | bool | int | float | complex
"""What a rank may give to a collective."""

TEXT_KINDS = "SU"
"""Numpy adds texts by writing them one behind the other, which no array of the same type holds."""
DTYPES_REMEMBERED = 256

_COMBINE: dict[Operation, np.ufunc] = {
    Operation.SUM: np.add,
    Operation.MEAN: np.add,
    Operation.MIN: np.minimum,
    Operation.MAX: np.maximum,
}


def pack(given: Given) -> Value:
    """A value as it travels; an array's elements stay where they are."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        return Value(Form.BYTES, _checked(_bytes_of(memoryview(given))))
    return pack_array(given)


def _bytes_of(data: memoryview) -> memoryview:
    try:
        return data.cast("B")
    except (TypeError, ValueError):
        # It has no elements, or these do not lie in order, or are of a type that Python has no word for.
        return memoryview(data.tobytes())


def pack_array(given: Given) -> Value:
    """An array or a number as it travels."""
    if not isinstance(given, (np.ndarray, np.generic, bool, int, float, complex)):
        raise _unfit(f"a {type(given).__name__}")
    if isinstance(given, np.ma.MaskedArray):
        # The others would take what is masked for numbers.
        raise _unfit("a masked array")
    array = np.asarray(given)
    if not travels(array.dtype):
        raise _unfit(f"an array of {array.dtype}")
    return Value(_form(given), _checked(memory_of(array)), name_of(array.dtype), array.shape)


def memory_of(array: Array) -> memoryview:
    """The bytes of an array: its own if they lie in order, else a copy's."""
    if array.size == 0:
        return memoryview(b"")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def unpack(value: Value) -> Any:
    """What was given, in memory of its own."""
    if value.form is Form.BYTES:
        return bytes(value.data)
    array = _view(value).copy()
    if value.form is Form.ARRAY:
        return array
    return array[()] if value.form is Form.SCALAR else array.item()


def unpack_into(value: Value, out: Array) -> Array:
    """Put the elements into an array that fits exactly."""
    np.copyto(out, _view(value), casting="no")
    return out


def check_out(value: Value, operation: Operation, out: Array) -> None:
    """Refuse an array that the result would not fit, before anything is sent."""
    wanted = _reduced_dtype(operation, value)
    if (out.dtype, out.shape) != (wanted, value.shape) or not out.flags.writeable:
        raise RequestRefused(
            "collective_out_unfit",
            f"the result is {wanted} of shape {value.shape}, and `out` is {out.dtype} of shape {out.shape}",
            "give a writeable array of that type and shape, or none",
        )


def check_reduced(operation: Operation, value: Value, reduced: Value) -> None:
    """What a rank has brought and what comes back must fit each other, or it is the hub's mistake."""
    wanted = _reduced_dtype(operation, value)
    found = dtype_named(reduced.dtype)
    if (found, reduced.shape) != (wanted, value.shape):
        due = f"{wanted} of shape {value.shape}"
        raise PeerError("value_invalid", f"a {operation} that is {due} came as {found} of shape {reduced.shape}")


def reduce(operation: Operation, values: Sequence[Value]) -> Value:
    """One value out of those of all ranks, in their order."""
    first, *others = map(_view, values)
    # Integers are summed as the floats that their mean is, so that no sum runs over.
    total = first.astype(_mean_dtype(first.dtype)) if operation is Operation.MEAN else first.copy()
    combine = _COMBINE[operation]
    # What overflows is told by the result, as everywhere in numpy; a warning here would be nobody's.
    with np.errstate(all="ignore"):
        for other in others:
            combine(total, other, out=total, casting="same_kind")
        if operation is Operation.MEAN:
            np.divide(total, len(values), out=total, casting="same_kind")
    return Value(values[0].form, memory_of(total), name_of(total.dtype), total.shape)


def check_operation(operation: Operation, value: Value) -> None:
    """Refuse what numpy cannot do with arrays of this type."""
    if (reason := _obstacle(operation, value.dtype)) is not None:
        raise RequestRefused(
            "collective_unfit", f"there is no {operation} of {value.dtype}: {reason}", "give an array of numbers"
        )


@lru_cache(maxsize=DTYPES_REMEMBERED)
def _obstacle(operation: Operation, dtype: str) -> str | None:
    """Why arrays of this type cannot be reduced so; None if they can."""
    if np.dtype(dtype).kind in TEXT_KINDS:
        return "it is text"
    empty = Value(Form.ARRAY, memoryview(b""), dtype, (0,))
    try:
        reduce(operation, [empty, empty])
    except TypeError as error:
        return str(error)
    return None


def _view(value: Value) -> Array:
    """The elements where they are."""
    dtype = dtype_named(value.dtype)
    has_all = value.data.nbytes == dtype.itemsize * math.prod(value.shape)
    if not has_all or (value.form is not Form.ARRAY and value.shape):
        raise PeerError(
            "value_invalid", f"{value.data.nbytes} bytes are no {dtype} of shape {value.shape}, given as {value.form}"
        )
    return np.frombuffer(value.data, np.uint8).view(dtype).reshape(value.shape)


def dtype_named(name: str) -> np.dtype[Any]:
    """The type that another worker has named, if an array of it is one of numbers or texts."""
    try:
        dtype = np.dtype(name)
    except Exception as error:  # numpy reads a small language there, and stumbles in many ways
        raise PeerError("dtype_unknown", f"{name[:80]!r} is no type that this end knows", "import it") from error
    if not travels(dtype) or dtype.subdtype is not None:
        raise PeerError("value_invalid", f"an array of {dtype} is none of numbers or texts")
    return dtype


def travels(dtype: np.dtype[Any]) -> bool:
    """Whether an element is its bytes, under a name that says all of it."""
    return not dtype.hasobject and dtype.names is None and dtype.itemsize > 0


def _form(given: Given) -> Form:
    if isinstance(given, np.ndarray):
        return Form.ARRAY
    return Form.SCALAR if isinstance(given, np.generic) else Form.NUMBER


def _reduced_dtype(operation: Operation, value: Value) -> np.dtype[Any]:
    dtype = np.dtype(value.dtype)
    return _mean_dtype(dtype) if operation is Operation.MEAN else dtype


def _mean_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64) if dtype.kind in "biu" else dtype


def name_of(dtype: np.dtype[Any]) -> str:
    """A type as it travels."""
    # The short form of a type that somebody has added to numpy is that of its bytes only.
    return dtype.str if np.dtype(dtype.str) == dtype else dtype.name


def _checked(data: memoryview) -> memoryview:
    if data.nbytes > COLLECTIVE_BYTES_MAX:
        raise RequestRefused(
            "collective_too_large",
            f"{data.nbytes} bytes are over the {COLLECTIVE_BYTES_MAX} of a collective",
            "use several smaller ones, or the framework's own collectives for large arrays",
        )
    return data


def _unfit(what: str) -> RequestRefused:
    return RequestRefused(
        "collective_unfit", f"{what} cannot be given to a collective", "give bytes, numbers or an array of numbers"
    )
