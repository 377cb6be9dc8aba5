"""Values on the command line."""

from __future__ import annotations

import argparse

import pytest

from forged.cli.forgectl.values import fact_id, settings, version
from forged.errors import ConfigError


def test_settings_are_values_by_name() -> None:
    assert settings(["a=1", "b=", "c=x=y", "d=none"]) == {"a": 1, "b": "", "c": "x=y", "d": None}


@pytest.mark.parametrize("texts", [["a=1", "a=1"], ["a"], ["=1"], [""]])
def test_what_means_nothing_or_two_things_is_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError):
        settings(texts)


@pytest.mark.parametrize("text", ["0", "-1", "1.0", "x", "", "9" * 19, "²"])
def test_a_version_is_a_number_from_1(text: str) -> None:
    assert version("1") == 1
    with pytest.raises(argparse.ArgumentTypeError):
        version(text)


@pytest.mark.parametrize("text", ["-1", "1.0", "x", "", "9" * 19])
def test_the_id_of_a_fact_is_a_number_from_0(text: str) -> None:
    assert fact_id("0") == 0
    with pytest.raises(argparse.ArgumentTypeError):
        fact_id(text)
