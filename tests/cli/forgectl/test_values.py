"""Values on the command line."""

from __future__ import annotations

import argparse

import pytest

from forged.cli.forgectl.values import fact_id, settings, version
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
