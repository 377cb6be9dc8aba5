from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.registry import (
    ModelInvalid,
    ModelVersion,
    compare_versions,
    format_version,
    next_version,
    parse_version,
    shape_compatibility,
    suggested_bump,
)
from forged.registry.model import NUMBER_MAX
from tests.registry.records import metadata

NUMBERS = st.integers(0, NUMBER_MAX) | st.integers(0, 3)
VERSIONS = st.builds(ModelVersion, NUMBERS, NUMBERS, NUMBERS)
SHAPES = st.lists(st.integers(0, 2), max_size=3)

# --- reading and writing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.0.0", ModelVersion(0, 0, 0)),
        ("1.2.3", ModelVersion(1, 2, 3)),
        ("10.200.3000", ModelVersion(10, 200, 3000)),
        ("4294967295.4294967295.4294967295", ModelVersion(NUMBER_MAX, NUMBER_MAX, NUMBER_MAX)),
    ],
)
def test_text_of_three_numbers_is_a_version(text: str, version: ModelVersion) -> None:
    assert parse_version(text) == version
    assert format_version(version) == text


NO_VERSIONS = [
    *("", ".", "..", "1", "1.2", "1.2.", ".1.2", "1..2", "1.2.3.", "1.2.3.4", "a.b.c"),
    *("v1.2.3", "1.2.3-rc1", "1.2.3+b"),
    *(" 1.2.3", "1.2.3 ", "1. 2.3", "1.2.3\n", "\t1.2.3", "1.2.3\x00", "+1.2.3", "1.-2.3", "-0.0.0", "1.2.+3"),
    *("01.2.3", "1.02.3", "1.2.003", "00.0.0", "1_0.2.3", "1e1.2.3", "0x1.2.3", "1,2,3", "1.2,3"),
    *("4294967296.0.0", "0.4294967296.0", "0.0.4294967296", "9" * 5000 + ".0.0"),
    *("١.٢.٣", "１.２.３", "1.2.²", "1．2．3", "1.2.3\u200b"),
]


@pytest.mark.parametrize("text", NO_VERSIONS, ids=ascii)
def test_any_other_text_is_no_version(text: str) -> None:
    assert parse_version(text) is None


@given(VERSIONS)
def test_written_version_is_read_as_itself(version: ModelVersion) -> None:
    assert parse_version(format_version(version)) == version


@given(st.text("0123456789.+- ٣", max_size=12))
def test_text_that_is_read_is_written_as_it_was(text: str) -> None:
    version = parse_version(text)
    assert version is None or format_version(version) == text


# --- comparing --------------------------------------------------------------------------------------------------------

ASCENDING = ["0.0.0", "0.0.1", "0.0.4294967295", "0.1.0", "0.4294967295.0", "1.0.0", "1.9.9", "1.10.0", "2.0.0"]
ASCENDING += ["4294967295.0.0", "4294967295.4294967295.4294967294", "4294967295.4294967295.4294967295"]


@pytest.mark.parametrize("place", range(len(ASCENDING)))
def test_versions_compare_by_number_and_major_first(place: int) -> None:
    versions = [parse_version(text) for text in ASCENDING]
    compared = [compare_versions(versions[place], other) for other in versions if versions[place] and other]  # type: ignore[arg-type]
    assert compared == [1] * place + [0] + [-1] * (len(ASCENDING) - place - 1)


@given(VERSIONS, VERSIONS)
def test_comparison_is_that_of_the_numbers(a: ModelVersion, b: ModelVersion) -> None:
    numbers_a, numbers_b = (a.major, a.minor, a.patch), (b.major, b.minor, b.patch)
    assert compare_versions(a, b) == (numbers_a > numbers_b) - (numbers_a < numbers_b) == -compare_versions(b, a)


# --- the next version -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("highest", "bump", "following"),
    [
        (None, "major", "1.0.0"),
        (None, "minor", "0.1.0"),
        (None, "patch", "0.0.1"),
        ("1.2.3", "major", "2.0.0"),
        ("1.2.3", "minor", "1.3.0"),
        ("1.2.3", "patch", "1.2.4"),
        ("1.4294967295.4294967295", "major", "2.0.0"),
    ],
)
def test_next_version_has_the_next_number_and_zeros_after_it(highest: str | None, bump: str, following: str) -> None:
    assert str(next_version(highest and parse_version(highest), bump)) == following  # type: ignore[arg-type]


@given(VERSIONS.filter(lambda version: NUMBER_MAX not in (version.major, version.minor, version.patch)))
def test_each_bump_is_higher_than_the_version_and_the_smaller_bumps(version: ModelVersion) -> None:
    patch, minor, major = (next_version(version, bump) for bump in ("patch", "minor", "major"))
    assert version < patch < minor < major


@pytest.mark.parametrize("bump", ["major", "minor", "patch"])
def test_number_that_cannot_grow_is_refused(bump: str) -> None:
    with pytest.raises(ModelInvalid, match=f"{bump} must be an integer from 0 to 4294967295, got 4294967296"):
        next_version(ModelVersion(NUMBER_MAX, NUMBER_MAX, NUMBER_MAX), bump)


@pytest.mark.parametrize("bump", ["", "Major", "huge"])
def test_unknown_bump_is_refused(bump: str) -> None:
    with pytest.raises(ModelInvalid, match="bump must be one of major, minor, patch"):
        next_version(None, bump)


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "score"),
    [
        (([1, 3, 224, 224], [1, 1000]), ([1, 3, 224, 224], [1, 1000]), 1.0),
        (([], []), ([], []), 1.0),
        (([0], [0]), ([0], [0]), 1.0),
        (([1, 3], [10]), ([1, 3], [20]), 0.5),
        (([1, 3], [10]), ([2, 3], [10]), 0.75),
        (([1, 3, 224, 224], [1, 1000]), ([1, 3, 299, 299], [1, 1000]), 0.75),
        (([3], [10]), ([3, 1], [10]), 0.75),
        (([3], [10]), ([], [10]), 0.5),
        (([3], [10]), ([], []), 0.0),
        (([1, 2], [3]), ([2, 1], [4]), 0.0),
    ],
)
def test_shapes_fit_as_far_as_their_sizes_are_equal(a: Any, b: Any, score: float) -> None:
    assert shape_compatibility(*a, *b) == score
    assert shape_compatibility(*b, *a) == score
    assert shape_compatibility(*map(tuple, a), *b) == score


@given(SHAPES, SHAPES, SHAPES, SHAPES)
def test_only_equal_shapes_fit_completely(in_a: list[int], out_a: list[int], in_b: list[int], out_b: list[int]) -> None:
    score = shape_compatibility(in_a, out_a, in_b, out_b)
    assert 0.0 <= score <= 1.0
    assert (score == 1.0) is ((in_a, out_a) == (in_b, out_b))


@pytest.mark.parametrize(
    ("changes", "bump", "reason"),
    [
        ({"input_shape": [1, 3, 299, 299], "framework": "onnx"}, "major", "input_shape changes from [1, 3, 224, 224]"),
        ({"framework": "onnx", "checksum": "sha256:1"}, "minor", "framework changes from pytorch to onnx"),
        ({"checksum": "sha256:1"}, "patch", "only the weights change"),
        ({"name": "another", "tags": {}}, "patch", "the files are the same"),
        ({"output_shape": []}, "patch", "the files are the same"),
        (
            {"output_shape": [], "checksum": "sha256:1"},
            "patch",
            "only the weights change, as far as known: only one version has output_shape",
        ),
        (
            {"input_shape": [], "output_shape": [], "framework": "onnx"},
            "minor",
            "callers need not change, as far as known: only one version has input_shape and output_shape",
        ),
        (
            {"framework": "", "checksum": "sha256:1"},
            "patch",
            "only the weights change, as far as known: only one version has framework",
        ),
        ({"input_shape": [1], "output_shape": []}, "major", "input_shape changes from [1, 3, 224, 224] to [1]"),
    ],
)
def test_suggested_bump_is_the_greatest_that_a_change_needs(changes: dict[str, Any], bump: str, reason: str) -> None:
    suggested, why = suggested_bump(metadata(), metadata(**changes))
    assert suggested == bump
    assert reason in why
