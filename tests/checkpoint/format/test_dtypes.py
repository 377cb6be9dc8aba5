from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.dtypes import EXTENDED, NAME_CHARS_MAX, SAFETENSORS, dtype_of, name_of, safetensors_name

PLAIN = [np.dtype(code) for code in "?bBhHiIlLqQefdgFDG"]
OTHERS = ["S1", "S7", "U1", "U12", "V5", "M8[s]", "M8[25us]", "m8[D]", "m8", "S0", "U0"]
SWAPPED = [">f4", ">i8", ">c16", ">U3", ">M8[ms]", ">f2"]


@pytest.mark.parametrize("dtype", [*PLAIN, *map(np.dtype, OTHERS), *map(np.dtype, SWAPPED)])
def test_a_type_is_found_by_its_name(dtype: np.dtype[Any]) -> None:
    again = dtype_of(name_of(dtype))
    assert again == dtype
    assert again.str == dtype.str
    assert name_of(again) == name_of(dtype)


@pytest.mark.parametrize("name", sorted(EXTENDED))
def test_ml_dtypes_types_have_their_names(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert name_of(dtype) == name
    assert dtype_of(name) == dtype
    array = np.arange(2).astype(dtype)
    assert np.frombuffer(array.tobytes(), dtype_of(name)).tobytes() == array.tobytes()


def test_byte_orders_are_distinct_types() -> None:
    assert name_of(np.dtype("<f4")) == name_of(np.dtype("=f4")) == "float32"
    assert name_of(np.dtype(">f4")) == ">f4"


def test_aliases_have_one_name() -> None:
    assert {name_of(np.dtype(code)) for code in (np.int64, "l", "q", "i8")} == {"int64"}


@pytest.mark.parametrize(
    "dtype", [np.dtype(object), np.dtype([("a", "f4")]), np.dtype(("f4", (3,))), np.dtype([("a", object)])]
)
def test_an_unsupported_type_is_refused_with_a_fix(dtype: np.dtype[Any]) -> None:
    with pytest.raises(CheckpointException) as caught:
        name_of(dtype)
    assert caught.value.code == "checkpoint_dtype_unsupported"
    assert caught.value.fix


@pytest.mark.parametrize(
    "name",
    [
        "",
        "O",
        "|O",
        "object",
        "float",
        "f4",
        "<f4",
        "=f4",
        "double",
        "int",
        "float32,float32",
        "(2,)f4",
        "f4,(2,)i4",
        "{'names': ['a'], 'formats': ['f4']}",
        "bfloat17",
        "int1",
        "float32 ",
        " float32",
        "Float32",
        "U99999999999999999999",
        "S-1",
        "M8[parsecs]",
        "a" * 1000,
        "<U" + "1" * 80,
        "\0",
        "finfo",
        "__doc__",
    ],
)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(CheckpointException) as caught:
        dtype_of(name)
    assert caught.value.type is ExceptionType.INCOMPATIBLE_VERSION
    assert len(caught.value.message) < 3 * NAME_CHARS_MAX


@given(st.text("()[]{},:'fiuSUVMmOab0189 <>=|TsDn.*-\\\0é", max_size=12))
def test_any_text_is_a_name_or_refused(name: str) -> None:
    try:
        dtype = dtype_of(name)
    except CheckpointException:
        return
    assert name_of(dtype) == name


@pytest.mark.parametrize("name", [",>O4s", "9a", "a5"])
def test_names_that_numpy_would_parse_are_refused(name: str) -> None:
    with pytest.raises(CheckpointException):
        dtype_of(name)


def test_safetensors_names_of_examples() -> None:
    for name, there in SAFETENSORS.items():
        assert safetensors_name(name) == there
        assert dtype_of(name).str[0] != ">"
    assert safetensors_name(">f4") is None
    assert safetensors_name("complex128") is None


def test_without_ml_dtypes_only_its_types_are_refused() -> None:
    script = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "from forged.checkpoint.format.dtypes import dtype_of\n"
        "assert dtype_of('float32').itemsize == 4\n"
        "try: dtype_of('bfloat16')\n"
        "except Exception as error: print(error.code, error.fix)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "checkpoint_dtype_missing pip install ml_dtypes"
