from __future__ import annotations

import pytest

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.names import NAME_CHARS_MAX, check_name, check_name_prefix

BAD_PARTS = [".", "..", ".hidden", "a\0b", "a\nb", "a\\b", "x" * 256, "ö" * 128, "\ud800"]


@pytest.mark.parametrize("name", ["a", "a/b", "run 1/step-100.metadata.json", "é/ö", "x" * 255])
def test_a_valid_name_is_returned(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "/", "/a", "a/", "a//b", *BAD_PARTS, "/".join("a" * NAME_CHARS_MAX)])
def test_names_that_could_leave_the_storage_are_refused(name: str) -> None:
    with pytest.raises(CheckpointException) as caught:
        check_name(name)
    assert caught.value.code == "checkpoint_name_invalid"


@pytest.mark.parametrize("part", BAD_PARTS)
def test_parts_that_could_leave_the_storage_are_refused(part: str) -> None:
    for name in (f"{part}/a", f"a/{part}", f"a/{part}/b"):
        with pytest.raises(CheckpointException):
            check_name(name)


@pytest.mark.parametrize("start", ["", "a", "a/", "a/b", "run 1/step-"])
def test_valid_name_prefixes_are_returned(start: str) -> None:
    assert check_name_prefix(start) == start


@pytest.mark.parametrize("start", ["/", "/a", "a//", *BAD_PARTS, *(f"a/{part}" for part in BAD_PARTS)])
def test_invalid_name_prefixes_are_refused(start: str) -> None:
    with pytest.raises(CheckpointException):
        check_name_prefix(start)
