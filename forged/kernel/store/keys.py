"""The order of keys, and the range that a prefix covers.

Law: keys are ordered by their code points, which is the order of their UTF-8 bytes, so Python and the medium agree.
"""

from __future__ import annotations

from forged.kernel.store.port import KEY_BYTES_MAX

CHARACTER_MAX = "\U0010ffff"
KEY_END = CHARACTER_MAX * (KEY_BYTES_MAX // len(CHARACTER_MAX.encode()) + 1)
"""Behind every key: one character longer than the longest key of the highest character."""

SURROGATE_FIRST, SURROGATE_LAST = 0xD800, 0xDFFF


def prefix_end(prefix: str) -> str:
    """The first string behind every key that starts with `prefix`."""
    stem = prefix.rstrip(CHARACTER_MAX)
    return stem[:-1] + _next_character(stem[-1]) if stem else KEY_END


def _next_character(character: str) -> str:
    """The following code point that text may contain; surrogates are none."""
    following = ord(character) + 1
    return chr(SURROGATE_LAST + 1 if following == SURROGATE_FIRST else following)
