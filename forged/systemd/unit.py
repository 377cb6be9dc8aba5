"""The texts of systemd units as they are installed.

Invariants:
- An installed file begins with a digest of its text, so that every version recognises files that it may overwrite
  because an operator has not changed them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import PurePath

from forged.errors import ConfigError

COMMAND = "/usr/bin/forged"
"""The command in the unit that is replaced by the installed one."""

STAMP = b"# Written by forged install-service, sha256 "

HIDDEN: Mapping[str, tuple[tuple[str, ...], str]] = {
    "ProtectHome": (("/home", "/root", "/run/user"), "read-only"),
    "PrivateTmp": (("/tmp", "/var/tmp"), "no"),  # noqa: S108 - only compared with
}
"""By directive: the directories that it hides from the service, and the value that makes them visible."""

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_.,:+@/-]+")


def with_command(unit: str, command: str) -> str:
    """The unit with this command in `ExecStart=`."""
    if not _PLAIN_PATH.fullmatch(command):
        raise ConfigError(
            "command_path_unfit",
            f"{command!r} cannot be written into a unit without quoting",
            "install forged at an absolute path of letters, digits and _.,:+@-",
        )
    start = f"\nExecStart={COMMAND} "
    assert unit.count(start) == 1, "the unit starts one command"
    return unit.replace(start, f"\nExecStart={command} ")


def hidden(paths: Iterable[PurePath]) -> dict[str, PurePath]:
    """The directives that hide one of these paths from the service, each with the first path that it hides."""
    found: dict[str, PurePath] = {}
    for path in paths:
        for directive, (directories, _) in HIDDEN.items():
            if any(path.is_relative_to(directory) for directory in directories):
                found.setdefault(directive, path)
    return found


def unprotected(unit: str, directives: Iterable[str]) -> str:
    """The unit with these directives relaxed."""
    for directive in directives:
        protection = f"\n{directive}=yes\n"
        assert unit.count(protection) == 1, f"the unit has one {directive}="
        unit = unit.replace(protection, f"\n{directive}={HIDDEN[directive][1]}\n")
    return unit


def stamped(text: str) -> bytes:
    """The text preceded by its digest."""
    body = text.encode()
    return STAMP + sha256(body).hexdigest().encode() + b"\n" + body


def is_untouched(content: bytes) -> bool:
    """Whether this is a stamped text of any version, unchanged."""
    first, _, body = content.partition(b"\n")
    return first == STAMP + sha256(body).hexdigest().encode()
