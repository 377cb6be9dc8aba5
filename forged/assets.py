"""The files that come along with the code: units, default settings, plugins.

Law: a checkout has them next to the package, an installed wheel wherever the installer put its data. Whichever it is,
these are the files of the very code that runs.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from forged.errors import ConfigError

DISTRIBUTION = "forged-ml"
SHARE = "share/forged"
BESIDE = Path(__file__).parents[1]
"""The directory that the package is in."""


def asset(kind: str, name: str) -> Path:
    """A file that came along; its kind is its directory: `systemd`, `config` or `plugins`."""
    found = next((path for path in _places(kind, name) if path.is_file()), None)
    if found is None:
        raise ConfigError(
            "asset_missing",
            f"{kind}/{name}, which comes with forged, is not where it was installed",
            "install forged again: `pip install --force-reinstall forged-ml`",
        )
    return found


def _places(kind: str, name: str) -> Iterator[Path]:
    if (BESIDE / "pyproject.toml").exists():
        yield BESIDE / kind / name
    yield from _recorded(kind, name)
    # `pip install --target` records where the files were before it moved them here, and packages of a distribution
    # have no record at all.
    yield BESIDE / SHARE / kind / name
    yield Path(sysconfig.get_path("data")) / SHARE / kind / name


def _recorded(kind: str, name: str) -> Iterator[Path]:
    """Where the installer says that it put it."""
    wanted = (*SHARE.split("/"), kind, name)
    try:
        installed = files(DISTRIBUTION) or []
    except PackageNotFoundError:
        return
    for file in installed:
        if file.parts[-len(wanted) :] == wanted:
            yield Path(str(file.locate()))
