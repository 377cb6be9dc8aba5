"""Finding plugins, and bringing their code.

Law: what is run as the daemon is written by nobody but root and the daemon's own user. So the file, and every directory
on the way to it, belongs to one of them and can be written by no others; and what is run is what was checked, read once
through the descriptor that was looked at.
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
    """All plugins that there are: those installed beside the daemon, then those in the directory, each by name."""
    installed = in_environment(entry_points(group=GROUP))
    return [*installed, *(in_directory(Path(directory), uid) if directory else ())]


def in_environment(points: Iterable[EntryPoint]) -> Iterator[PluginSource]:
    """The plugins of installed packages."""
    for point in sorted(points, key=lambda point: point.name):
        # A package whose metadata is damaged has neither name nor version.
        version = (point.dist and point.dist.version) or ""
        package = (point.dist and point.dist.name) or "a package"
        yield PluginSource(point.name, f"{package} ({point.value})", partial(_load_point, point), version)


def in_directory(directory: Path, uid: int) -> Iterator[PluginSource]:
    """The plugins of a directory: its `*.py`, but for those whose names begin with `_` or a dot."""
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
    # Types look for their module by its name while they are being made.
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)  # noqa: S102 - this is what a plugin is
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _read(path: Path, uid: int) -> bytes:
    """The source, if only those may have written it who might as well have written the daemon."""
    try:
        source = _read_checked(Path(os.path.realpath(path, strict=True)), uid)
    except OSError as error:
        raise ConfigError("plugin_unreadable", f"{path}: {error.strerror}", "see that it can be read") from error
    if len(source) > SOURCE_BYTES_MAX:
        raise ConfigError("plugin_unreadable", f"{path} is larger than {SOURCE_BYTES_MAX} bytes", "is it a plugin?")
    return source


def _read_checked(real: Path, uid: int) -> bytes:
    for directory in real.parents:
        _check(directory, directory.stat(), uid)
    # Not blocking: what is called *.py may be a pipe that nobody writes to.
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
        reason = f"{path} belongs to user {found.st_uid}, who is neither root nor the daemon's"
        raise ConfigError("plugin_owner", reason, f"chown root {path}")
    # In a sticky directory nobody can put something in the place of what belongs to others.
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & WRITABLE_BY_OTHERS and not sticky:
        reason = f"{path} can be written by others than its owner (mode {stat.S_IMODE(found.st_mode):04o})"
        raise ConfigError("plugin_mode", reason, f"chmod go-w {path}")


def _legible(name: str) -> str:
    """A name that need not be text to the file system, as text."""
    return name.encode(errors="backslashreplace").decode()
