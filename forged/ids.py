"""Names and numbers that identify things.

Law: an identifier says nothing but which; randomness for one is an argument. A fact's id is the revision at which it
became durable, so ids only grow, and comparing two of them compares their places in history.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from forged.errors import RequestRefused

CLIENT_ID_BYTES = 16
NAME_LENGTH_MAX = 128

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\Z")


def new_client_id(getrandbits: Callable[[int], int]) -> bytes:
    """A client's identity over all its connections; with a request's number it makes that request unique."""
    return getrandbits(8 * CLIENT_ID_BYTES).to_bytes(CLIENT_ID_BYTES, "big")


def check_name(field: str, name: str) -> str:
    """The name, if it can stand in a key, a path and a label; else a refusal that names the field."""
    if len(name) > NAME_LENGTH_MAX or not _NAME.match(name):
        raise RequestRefused(
            "name_invalid",
            f"{field} = {name[:NAME_LENGTH_MAX]!r} is not a name",
            f"use 1 to {NAME_LENGTH_MAX} letters, digits, '.', '_' or '-', the first and last a letter or digit",
        )
    return name
