"""Values on the command line."""

from __future__ import annotations

import argparse

import pytest

from forged.cli.forgectl.values import BYTES_MAX, byte_count, fact_id, settings, version
from forged.errors import ConfigError


def test_settings_are_parsed_as_key_and_value() -> None:
    assert settings(["a=1", "b=", "c=x=y", "d=none"]) == {"a": 1, "b": "", "c": "x=y", "d": None}


@pytest.mark.parametrize("texts", [["a=1", "a=1"], ["a"], ["=1"], [""]])
def test_invalid_or_ambiguous_setting_is_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError):
        settings(texts)


@pytest.mark.parametrize("text", ["0", "-1", "1.0", "x", "", "9" * 19, "²"])
def test_version_must_be_at_least_1(text: str) -> None:
    assert version("1") == 1
    with pytest.raises(argparse.ArgumentTypeError):
        version(text)


@pytest.mark.parametrize("text", ["-1", "1.0", "x", "", "9" * 19])
def test_fact_id_must_be_at_least_0(text: str) -> None:
    assert fact_id("0") == 0
    with pytest.raises(argparse.ArgumentTypeError):
        fact_id(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("12", 12), ("3B", 3), ("2 kB", 2000), ("1KiB", 1024), ("80GB", 80 * 10**9), ("1TiB", 1 << 40)],
)
def test_size_may_have_a_unit(text: str, size: int) -> None:
    assert byte_count(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5GB", "1 kib", "1K", "²", "9" * 20, "8388608TiB", " 1"])
def test_size_must_be_exact_and_within_64_bits(text: str) -> None:
    assert byte_count(f"{BYTES_MAX}") == BYTES_MAX
    with pytest.raises(argparse.ArgumentTypeError):
        byte_count(text)
