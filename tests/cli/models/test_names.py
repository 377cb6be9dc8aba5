"""Models and versions on the command line."""

from __future__ import annotations

import pytest

from forged.cli.models import history, names
from forged.errors import ConfigError

NOW = 1_800_000_000.0


def test_reference_follows_the_model() -> None:
    assert names.named("vision/resnet@1.2.0") == ("vision/resnet", "1.2.0")
    assert names.named("resnet") == ("resnet", "")
    assert names.with_ref("resnet@latest").ref == "latest"
    assert names.alone("resnet") == "resnet"


@pytest.mark.parametrize("text", ["", "@1.2.0", "resnet@"])
def test_text_without_model_or_reference_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="use MODEL, or MODEL@REF"):
        names.named(text)


def test_missing_reference_names_the_command_that_lists_them() -> None:
    with pytest.raises(ConfigError, match="`forgectl models versions resnet` lists"):
        names.with_ref("resnet")
    with pytest.raises(ConfigError, match="whole model: resnet"):
        names.alone("resnet@1.0.0")


@pytest.mark.parametrize("text", ["1.2", "1.2.3.4", "01.2.3", "v1.2.3", "1.2.-3", "١.٢.٣", ""])
def test_text_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a version"):
        names.version(text)
    assert not names.is_version(text)


def test_version_is_sent_as_numbers() -> None:
    assert names.version("1.20.3") == [1, 20, 3]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("90s", NOW - 90),
        ("2h", NOW - 7200),
        ("1.5d", NOW - 129_600),
        ("1700000000", 1.7e9),
        ("2026-11-20T08:00+00:00", 1795161600.0),
    ],
)
def test_time_is_an_age_seconds_or_iso(text: str, at: float) -> None:
    assert history.moment(text, NOW) == at


@pytest.mark.parametrize("text", ["yesterday", "", "-2h", "2w", "2026-13-01", "nan"])
def test_text_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a time"):
        history.moment(text, NOW)
