"""Write and load settings files as an unprivileged user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forged.config import Config, load
from forged.errors import ConfigError, Problem

HOME = {"HOME": "/home/me"}
USER = 1000
NOTHING: dict[str, Any] = {}


def write(directory: Path, text: str | bytes) -> Path:
    """Write the settings file."""
    path = directory / "forged.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(directory: Path, text: str | bytes, **overrides: Any) -> Config:
    """Load these settings."""
    return load(write(directory, text), overrides, HOME, USER)


def problems(directory: Path, text: str, **overrides: Any) -> list[Problem]:
    """The problems of invalid settings."""
    with pytest.raises(ConfigError) as caught:
        read(directory, text, **overrides)
    assert caught.value.code == "config_invalid"
    return list(caught.value.problems)


def wrong_keys(directory: Path, text: str, **overrides: Any) -> list[str]:
    """The keys of the problems."""
    return [problem.key for problem in problems(directory, text, **overrides)]
