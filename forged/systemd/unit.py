"""Units as texts: what is put into one where it is installed, and whose text it is by now.

Law: what we wrote and nobody has changed since can be told from everything else, in every version. It carries its own
digest, so neither the older texts nor a list of them need be kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import PurePath

from forged.errors import ConfigError

COMMAND = "/usr/bin/forged"
"""What stands in the unit for the command's real path."""

STAMP = b"# Written by forged install-service, sha256 "

HIDDEN: Mapping[str, tuple[tuple[str, ...], str]] = {
    "ProtectHome": (("/home", "/root", "/run/user"), "read-only"),
    "PrivateTmp": (("/tmp", "/var/tmp"), "no"),  # noqa: S108 - nothing is written there
}
"""By directive: the directories that it hides from the service, and what it has to be for them to be seen."""

_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_.,:+@/-]+")


def with_command(unit: str, command: str) -> str:
    """The unit of a daemon that is started by this command."""
    if not _PLAIN_PATH.fullmatch(command):
        raise ConfigError(
            "command_path_unfit",
            f"{command!r} cannot stand in a unit as it is",
            "install forged at an absolute path of letters, digits and the signs _.,:+@-",
        )
    start = f"\nExecStart={COMMAND} "
    assert unit.count(start) == 1, "the unit starts one command"
    return unit.replace(start, f"\nExecStart={command} ")


def hidden(paths: Iterable[PurePath]) -> dict[str, PurePath]:
    """Which directives hide one of these paths from the service, each with the first that it hides."""
    found: dict[str, PurePath] = {}
    for path in paths:
        for directive, (directories, _) in HIDDEN.items():
            if any(path.is_relative_to(directory) for directory in directories):
                found.setdefault(directive, path)
    return found


def unprotected(unit: str, directives: Iterable[str]) -> str:
    """The unit without these protections, as far as the service can do with less."""
    for directive in directives:
        protection = f"\n{directive}=yes\n"
        assert unit.count(protection) == 1, f"the unit has one {directive}="
        unit = unit.replace(protection, f"\n{directive}={HIDDEN[directive][1]}\n")
    return unit


def stamped(text: str) -> bytes:
    """The text as it is installed, under its digest."""
    body = text.encode()
    return STAMP + sha256(body).hexdigest().encode() + b"\n" + body


def is_untouched(content: bytes) -> bool:
    """Whether this is a stamped text, of any version, that nobody has changed since."""
    first, _, body = content.partition(b"\n")
    return first == STAMP + sha256(body).hexdigest().encode()
