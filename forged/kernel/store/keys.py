"""The key range of a prefix.

Keys are ordered by code points, which is the order of their UTF-8 bytes; Python and SQLite agree on it.
"""

from __future__ import annotations

from forged.kernel.store.port import KEY_BYTES_MAX

CHARACTER_MAX = "\U0010ffff"
KEY_END = CHARACTER_MAX * (KEY_BYTES_MAX // len(CHARACTER_MAX.encode()) + 1)
"""Greater than every valid key."""

SURROGATE_FIRST, SURROGATE_LAST = 0xD800, 0xDFFF


def prefix_end(prefix: str) -> str:
    """The smallest string greater than every key that starts with `prefix`."""
    stem = prefix.rstrip(CHARACTER_MAX)
    return stem[:-1] + _next_character(stem[-1]) if stem else KEY_END


def _next_character(character: str) -> str:
    """The next code point, skipping surrogates."""
    following = ord(character) + 1
    return chr(SURROGATE_LAST + 1 if following == SURROGATE_FIRST else following)
