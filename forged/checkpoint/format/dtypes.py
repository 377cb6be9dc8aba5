"""The element types that a checkpoint can hold, by name.

Invariants:
- A type has one name in all manifests, numpy's own, and loads as the same type with the same byte order.
- Types that the safetensors format lacks are stored as bytes there; the manifest names the type.
- Object arrays are refused.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import DTypeLike

from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid

SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""The names in the safetensors format, which has little-endian types only."""
RAW = "U8"
EXTENDED = frozenset(
    {
        "bfloat16",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "float4_e2m1fn",
        "int4",
        "uint4",
        "int2",
        "uint2",
    }
)
"""Types of the package ml_dtypes, each element in a byte or more."""
KINDS = "biufcSUmMV"
NAME_CHARS_MAX = 64
_NAME = re.compile(r"[<>|]?[A-Zb-z][A-Za-z0-9_]*(?:\[[0-9]*[A-Za-z]+\])?")


@lru_cache(maxsize=256)
def name_of(dtype: np.dtype) -> str:
    """What a type is called in a manifest."""
    if dtype.name in EXTENDED:
        return dtype.name
    if not _can_be_saved(dtype):
        raise invalid(
            f"arrays of type {dtype} cannot be saved",
            "use numbers, booleans or fixed-length strings; save the fields of a structured array separately",
            code="checkpoint_dtype_unsupported",
        )
    if dtype.kind in "biufc" and dtype.isnative and dtype.str[1:] == np.dtype(dtype.name).str[1:]:
        return dtype.name
    return dtype.str


@lru_cache(maxsize=256)
def dtype_of(name: str) -> np.dtype:
    """The type of that name; refuses a name that no manifest has."""
    if name in EXTENDED:
        return np.dtype(_extended(name))
    dtype = _plain(name) if len(name) <= NAME_CHARS_MAX else None
    if dtype is None or not _can_be_saved(dtype) or name != name_of(dtype):
        raise CheckpointException(
            f"unknown element type {name[:NAME_CHARS_MAX]!r}",
            type=ExceptionType.INCOMPATIBLE_VERSION,
            code="checkpoint_dtype_unknown",
            fix="load it with the version of forged that saved it",
        )
    return dtype


def safetensors_name(name: str) -> str | None:
    """The type's name in the safetensors format; None if the format lacks it."""
    return SAFETENSORS.get(name)


def _can_be_saved(dtype: np.dtype) -> bool:
    return not dtype.hasobject and dtype.kind in KINDS and dtype.subdtype is None and dtype.names is None


def _plain(name: str) -> np.dtype | None:
    """Numpy's type of that name. Checked first, because numpy parses more than names."""
    if not _NAME.fullmatch(name):
        return None
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        return None


def _extended(name: str) -> DTypeLike:
    try:
        import ml_dtypes
    except ImportError:
        raise CheckpointException(
            f"arrays of type {name} need the package ml_dtypes",
            type=ExceptionType.INCOMPATIBLE_VERSION,
            code="checkpoint_dtype_missing",
            fix="pip install ml_dtypes",
        ) from None
    found: DTypeLike = getattr(ml_dtypes, name)
    return found
