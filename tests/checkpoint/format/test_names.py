from __future__ import annotations

import pytest

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.format.names import NAME_CHARS_MAX, check_name, check_name_prefix

BAD_PARTS = [".", "..", ".hidden", "a\0b", "a\nb", "a\\b", "x" * 256, "ö" * 128, "\ud800"]


@pytest.mark.parametrize("name", ["a", "a/b", "run 1/step-100.metadata.json", "é/ö", "x" * 255])
def test_a_name_is_given_back(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "/", "/a", "a/", "a//b", *BAD_PARTS, "/".join("a" * NAME_CHARS_MAX)])
def test_what_could_lead_elsewhere_is_no_name(name: str) -> None:
    with pytest.raises(CheckpointException) as caught:
        check_name(name)
    assert caught.value.code == "checkpoint_name_invalid"


@pytest.mark.parametrize("part", BAD_PARTS)
def test_no_part_of_a_name_leads_elsewhere(part: str) -> None:
    for name in (f"{part}/a", f"a/{part}", f"a/{part}/b"):
        with pytest.raises(CheckpointException):
            check_name(name)


@pytest.mark.parametrize("start", ["", "a", "a/", "a/b", "run 1/step-"])
def test_names_begin_with_nothing_with_whole_parts_and_with_some_of_one(start: str) -> None:
    assert check_name_prefix(start) == start


@pytest.mark.parametrize("start", ["/", "/a", "a//", *BAD_PARTS, *(f"a/{part}" for part in BAD_PARTS)])
def test_no_name_begins_with_what_no_name_has(start: str) -> None:
    with pytest.raises(CheckpointException):
        check_name_prefix(start)
