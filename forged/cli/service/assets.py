"""Find the files that are distributed with the code: systemd units, default settings, plugins.

A checkout has them next to the package, an installed wheel in the installer's data directory. The files found are
always those of the running code.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from forged.errors import ConfigError

DISTRIBUTION = "forged-ml"
SHARE = "share/forged"
PACKAGE_PARENT = Path(__file__).parents[3]
"""The directory that contains the package."""


def asset(kind: str, name: str) -> Path:
    """The path of a distributed file; `kind` is its directory: `systemd`, `config` or `plugins`."""
    found = next((path for path in _candidates(kind, name) if path.is_file()), None)
    if found is None:
        raise ConfigError(
            "asset_missing",
            f"{kind}/{name}, a file of forged, is missing from the installation",
            "reinstall forged: `pip install --force-reinstall forged-ml`",
        )
    return found


def _candidates(kind: str, name: str) -> Iterator[Path]:
    if (PACKAGE_PARENT / "pyproject.toml").exists():
        yield PACKAGE_PARENT / kind / name
    yield from _recorded(kind, name)
    # `pip install --target` records the paths from before it moved the files, and distribution packages record none.
    yield PACKAGE_PARENT / SHARE / kind / name
    yield Path(sysconfig.get_path("data")) / SHARE / kind / name


def _recorded(kind: str, name: str) -> Iterator[Path]:
    """The paths in the installer's record."""
    wanted = (*SHARE.split("/"), kind, name)
    try:
        installed = files(DISTRIBUTION) or []
    except PackageNotFoundError:
        return
    for file in installed:
        if file.parts[-len(wanted) :] == wanted:
            yield Path(str(file.locate()))
