"""Finds plugins and loads their code.

Invariants:
- Code from the plugin directory is loaded only if root or the daemon's user owns the file and all directories above it,
  and no other user can write them.
- The source is read once, through the descriptor that was checked.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from forged.errors import ConfigError
from forged.plugins.host.plugin_host import PluginSource

GROUP = "forged.plugins"
MODULE_PREFIX = "forged_plugin_"
SOURCE_BYTES_MAX = 4 << 20
ROOT_UID = 0
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def find(directory: str, uid: int) -> list[PluginSource]:
    """All plugins: those of installed packages, then those in the directory, each sorted by name."""
    installed = in_environment(entry_points(group=GROUP))
    return [*installed, *(in_directory(Path(directory), uid) if directory else ())]


def in_environment(points: Iterable[EntryPoint]) -> Iterator[PluginSource]:
    """The plugins of installed packages."""
    for point in sorted(points, key=lambda point: point.name):
        # A package with damaged metadata has no name or version.
        version = (point.dist and point.dist.version) or ""
        package = (point.dist and point.dist.name) or "a package"
        yield PluginSource(point.name, f"{package} ({point.value})", partial(_load_point, point), version)


def in_directory(directory: Path, uid: int) -> Iterator[PluginSource]:
    """The plugins of a directory: `*.py`, except names that begin with `_` or a dot."""
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise ConfigError(
            "plugin_dir_unreadable", f"plugin_dir = {directory}: {error.strerror}", "name a directory that can be read"
        ) from error
    for path in paths:
        if path.suffix == ".py" and not path.name.startswith(("_", ".")):
            yield PluginSource(_legible(path.stem), _legible(str(path)), partial(_load_file, path, uid))


def _load_point(point: EntryPoint) -> ModuleType:
    module = point.load()
    if not isinstance(module, ModuleType):
        raise ConfigError("plugin_entry", f"{point.value} is not a module", "name the module alone: package.module")
    return module


def _load_file(path: Path, uid: int) -> ModuleType:
    source = _read(path, uid)
    name = MODULE_PREFIX + path.stem
    module = ModuleType(name)
    module.__file__ = str(path)
    code = compile(source, str(path), "exec", dont_inherit=True)
    # Class creation looks up its module by name.
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)  # noqa: S102 - plugins are code
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _read(path: Path, uid: int) -> bytes:
    """The source of a file that only root and the daemon's user can write."""
    try:
        source = _read_checked(Path(os.path.realpath(path, strict=True)), uid)
    except OSError as error:
        raise ConfigError(
            "plugin_unreadable", f"{path}: {error.strerror}", "make it readable for the daemon"
        ) from error
    if len(source) > SOURCE_BYTES_MAX:
        raise ConfigError(
            "plugin_unreadable", f"{path} is larger than {SOURCE_BYTES_MAX} bytes", "check that it is a plugin"
        )
    return source


def _read_checked(real: Path, uid: int) -> bytes:
    for directory in real.parents:
        _check(directory, directory.stat(), uid)
    # Non-blocking, because the file may be a pipe without a writer.
    fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError("plugin_unreadable", f"{real} is not a file", "put a Python module there")
        _check(real, found, uid)
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(SOURCE_BYTES_MAX + 1)
    finally:
        os.close(fd)


def _check(path: Path, found: os.stat_result, uid: int) -> None:
    if found.st_uid not in (ROOT_UID, uid):
        reason = f"{path} belongs to user {found.st_uid}, neither root nor the daemon's user"
        raise ConfigError("plugin_owner", reason, f"chown root {path}")
    # In a sticky directory a user cannot replace the files of other users.
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & WRITABLE_BY_OTHERS and not sticky:
        reason = f"{path} can be written by users other than its owner (mode {stat.S_IMODE(found.st_mode):04o})"
        raise ConfigError("plugin_mode", reason, f"chmod go-w {path}")


def _legible(name: str) -> str:
    """The file name with undecodable bytes escaped."""
    return name.encode(errors="backslashreplace").decode()
