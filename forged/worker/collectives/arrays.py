"""Arrays as values of a collective, and reductions of them.

Invariants:
- A value that is received has the type, the shape and every bit of the value that was sent.
- A reduction goes over the ranks in rank order, element by element, so its result is the same at every rank and in
  every run.
- A type that numpy cannot add is refused before anything is sent. Nothing is unpickled.
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
"""The types of a value that a rank may give to a collective."""

TEXT_KINDS = "SU"
"""Numpy concatenates texts, and an array of the same type has no room for the result."""
DTYPES_REMEMBERED = 256

_COMBINE: dict[Operation, np.ufunc] = {
    Operation.SUM: np.add,
    Operation.MEAN: np.add,
    Operation.MIN: np.minimum,
    Operation.MAX: np.maximum,
}


def pack(given: Given) -> Value:
    """Encode a value. An array's elements are not copied."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        return Value(Form.BYTES, _checked(_bytes_of(memoryview(given))))
    return pack_array(given)


def _bytes_of(data: memoryview) -> memoryview:
    try:
        return data.cast("B")
    except (TypeError, ValueError):
        # It is empty, not contiguous, or of a type without a format that `cast` accepts.
        return memoryview(data.tobytes())


def pack_array(given: Given) -> Value:
    """Encode an array or a number."""
    if not isinstance(given, (np.ndarray, np.generic, bool, int, float, complex)):
        raise _unfit(f"a {type(given).__name__}")
    if isinstance(given, np.ma.MaskedArray):
        # The other ranks would take masked elements for numbers.
        raise _unfit("a masked array")
    array = np.asarray(given)
    if not travels(array.dtype):
        raise _unfit(f"an array of {array.dtype}")
    return Value(_form(given), _checked(memory_of(array)), name_of(array.dtype), array.shape)


def memory_of(array: Array) -> memoryview:
    """The bytes of an array; those of a copy if the array is not contiguous."""
    if array.size == 0:
        return memoryview(b"")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def unpack(value: Value) -> Any:
    """Decode a value into memory of its own."""
    if value.form is Form.BYTES:
        return bytes(value.data)
    array = _view(value).copy()
    if value.form is Form.ARRAY:
        return array
    return array[()] if value.form is Form.SCALAR else array.item()


def unpack_into(value: Value, out: Array) -> Array:
    """Decode an array into one of the same type and shape."""
    np.copyto(out, _view(value), casting="no")
    return out


def check_out(value: Value, operation: Operation, out: Array) -> None:
    """Refuse an `out` array that does not fit the result, before anything is sent."""
    wanted = _reduced_dtype(operation, value)
    if (out.dtype, out.shape) != (wanted, value.shape) or not out.flags.writeable:
        raise RequestRefused(
            "collective_out_unfit",
            f"the result is {wanted} of shape {value.shape}, and `out` is {out.dtype} of shape {out.shape}",
            "give a writeable array of that type and shape, or none",
        )


def check_reduced(operation: Operation, value: Value, reduced: Value) -> None:
    """Refuse a result from the hub whose type or shape does not follow from this rank's value."""
    wanted = _reduced_dtype(operation, value)
    found = dtype_named(reduced.dtype)
    if (found, reduced.shape) != (wanted, value.shape):
        due = f"{wanted} of shape {value.shape}"
        raise PeerError("value_invalid", f"the {operation} must be {due}, got {found} of shape {reduced.shape}")


def reduce(operation: Operation, values: Sequence[Value]) -> Value:
    """Reduce the values of all ranks, in rank order."""
    first, *others = map(_view, values)
    # Integers are summed as floats for a mean, so that the sum cannot overflow.
    total = first.astype(_mean_dtype(first.dtype)) if operation is Operation.MEAN else first.copy()
    combine = _COMBINE[operation]
    # The result shows an overflow, as everywhere in numpy; a warning would not reach the script.
    with np.errstate(all="ignore"):
        for other in others:
            combine(total, other, out=total, casting="same_kind")
        if operation is Operation.MEAN:
            np.divide(total, len(values), out=total, casting="same_kind")
    return Value(values[0].form, memory_of(total), name_of(total.dtype), total.shape)


def check_operation(operation: Operation, value: Value) -> None:
    """Refuse a reduction that numpy does not have for arrays of this type."""
    if (reason := _obstacle(operation, value.dtype)) is not None:
        raise RequestRefused(
            "collective_unfit", f"{operation} is not defined for {value.dtype}: {reason}", "give an array of numbers"
        )


@lru_cache(maxsize=DTYPES_REMEMBERED)
def _obstacle(operation: Operation, dtype: str) -> str | None:
    """Why arrays of this type cannot be reduced; None if they can."""
    if np.dtype(dtype).kind in TEXT_KINDS:
        return "its elements are text"
    empty = Value(Form.ARRAY, memoryview(b""), dtype, (0,))
    try:
        reduce(operation, [empty, empty])
    except TypeError as error:
        return str(error)
    return None


def _view(value: Value) -> Array:
    """The array over the value's own memory."""
    dtype = dtype_named(value.dtype)
    has_all = value.data.nbytes == dtype.itemsize * math.prod(value.shape)
    if not has_all or (value.form is not Form.ARRAY and value.shape):
        raise PeerError(
            "value_invalid",
            f"{value.data.nbytes} bytes do not hold {dtype} of shape {value.shape}, sent as {value.form}",
        )
    return np.frombuffer(value.data, np.uint8).view(dtype).reshape(value.shape)


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype that another worker has named; only types of numbers and texts are accepted."""
    try:
        dtype = _dtype(name)
    except Exception as error:  # numpy parses the name, and raises various errors
        raise PeerError(
            "dtype_unknown", f"dtype {name[:80]!r} is unknown here", "import the package that defines it"
        ) from error
    if not travels(dtype) or dtype.subdtype is not None:
        raise PeerError("value_invalid", f"arrays of {dtype} are not accepted, only numbers and texts")
    return dtype


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        # It registers its types, such as bfloat16, with numpy.
        import ml_dtypes  # noqa: F401

        return np.dtype(name)


def travels(dtype: np.dtype[Any]) -> bool:
    """Whether the bytes and the name of a type are all that there is of an element."""
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
    """The name under which a type is sent."""
    try:
        is_short_form_enough = np.dtype(dtype.str) == dtype
    except TypeError:
        is_short_form_enough = False
    # The short form of a type from another package names only its size.
    return dtype.str if is_short_form_enough else dtype.name


def _checked(data: memoryview) -> memoryview:
    if data.nbytes > COLLECTIVE_BYTES_MAX:
        raise RequestRefused(
            "collective_too_large",
            f"{data.nbytes} bytes in a collective; limit {COLLECTIVE_BYTES_MAX}",
            "use several smaller ones, or the framework's own collectives for large arrays",
        )
    return data


def _unfit(what: str) -> RequestRefused:
    return RequestRefused(
        "collective_unfit", f"{what} cannot be given to a collective", "give bytes, numbers or an array of numbers"
    )
