"""Client ids and names.

Fact ids are not made here: a fact's id is the store revision at which it became durable, so ids ascend.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from forged.errors import RequestRefused

CLIENT_ID_BYTES = 16
NAME_LENGTH_MAX = 128

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?\Z")


def new_client_id(getrandbits: Callable[[int], int]) -> bytes:
    """A random client id, used on all connections of the client; with the request number it identifies a request."""
    return getrandbits(8 * CLIENT_ID_BYTES).to_bytes(CLIENT_ID_BYTES, "big")


def check_name(field: str, name: str) -> str:
    """Return the name if it is valid in keys, paths and labels; else raise `RequestRefused`."""
    if len(name) > NAME_LENGTH_MAX or not _NAME.match(name):
        raise RequestRefused(
            "name_invalid",
            f"{field} must be a valid name, got {name[:NAME_LENGTH_MAX]!r}",
            f"use 1 to {NAME_LENGTH_MAX} letters, digits, '.', '_' or '-', the first and last a letter or digit",
        )
    return name
