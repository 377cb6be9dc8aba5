"""Version numbers: reading, comparing, the next one, and how well two versions fit each other."""

from __future__ import annotations

import re
from collections.abc import Sequence

from forged.registry.errors import argument_invalid
from forged.registry.model import NUMBER_MAX, ModelMetadata, ModelVersion

MAJOR, MINOR, PATCH = "major", "minor", "patch"
BUMPS = (MAJOR, MINOR, PATCH)
CHANGES = (
    ("input_shape", MAJOR, "callers must change"),
    ("output_shape", MAJOR, "callers must change"),
    ("framework", MINOR, "callers need not change"),
)
"""What may change between two versions, the gravest first."""
_NUMBER = "(0|[1-9][0-9]{0,9})"
_VERSION = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}")


def compare_versions(a: ModelVersion, b: ModelVersion) -> int:
    """-1 if the first is lower, 0 if both are equal, 1 if the first is higher."""
    return (a > b) - (a < b)


def parse_version(version_str: str) -> ModelVersion | None:
    """The version that a text like `1.2.3` names; None for every other text, also for `01.2.3` and ` 1.2.3`."""
    found = _VERSION.fullmatch(version_str)
    numbers = [int(number) for number in found.groups()] if found else []
    return ModelVersion(*numbers) if numbers and max(numbers) <= NUMBER_MAX else None


def format_version(version: ModelVersion) -> str:
    return str(version)


def next_version(highest: ModelVersion | None, bump: str) -> ModelVersion:
    """The version after the highest one, if its `major`, `minor` or `patch` number grows; 0.0.0 is before the first."""
    if bump not in BUMPS:
        raise argument_invalid("bump", bump, f"one of {', '.join(BUMPS)}")
    major, minor, patch = (highest.major, highest.minor, highest.patch) if highest else (0, 0, 0)
    if bump == MAJOR:
        return ModelVersion(major + 1, 0, 0)
    return ModelVersion(major, minor + 1, 0) if bump == MINOR else ModelVersion(major, minor, patch + 1)


def shape_compatibility(
    input_a: Sequence[int], output_a: Sequence[int], input_b: Sequence[int], output_b: Sequence[int]
) -> float:
    """1.0 if both shapes of two models are equal; otherwise the mean share of equal sizes at equal places."""
    return (_share_of_equal_sizes(input_a, input_b) + _share_of_equal_sizes(output_a, output_b)) / 2


def _share_of_equal_sizes(a: Sequence[int], b: Sequence[int]) -> float:
    if not a and not b:
        return 1.0
    return sum(one == other for one, other in zip(a, b, strict=False)) / max(len(a), len(b))


def suggested_bump(older: ModelMetadata, newer: ModelMetadata) -> tuple[str, str]:
    """Which number of the version should grow from one version to the other, and why."""
    given_once: list[str] = []
    for name, bump, consequence in CHANGES:
        before, after = (_plain(getattr(metadata, name)) for metadata in (older, newer))
        if before and after and before != after:
            return bump, f"{name} changes from {before} to {after}: {consequence}{_as_far_as_known(given_once)}"
        if bool(before) is not bool(after):
            given_once.append(name)
    if older.checksum != newer.checksum:
        return PATCH, f"only the weights change{_as_far_as_known(given_once)}"
    return PATCH, "the files are the same"


def _plain(value: str | Sequence[int]) -> str | list[int]:
    return value if isinstance(value, str) else list(value)


def _as_far_as_known(given_once: Sequence[str]) -> str:
    """What was given for one version only has not changed: it is not known of the other."""
    return f", as far as known: only one version has {' and '.join(given_once)}" if given_once else ""
