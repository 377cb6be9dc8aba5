"""Phrases for sentences that people read: counts, lists of names, reasons.

Invariants:
- Every phrase reads correctly for any number, also for none and for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

NAMES_MAX = 8
REASONS_MAX = 8
REASON_CHARS_MAX = 500
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
OPERATOR_REQUEST = "requested by an operator"


def counted(number: int, thing: str) -> str:
    """A count with its noun: no worker, 1 worker, 2 workers."""
    return f"{f'{number:,}' if number else 'no'} {thing}{'s' if number > 1 else ''}"


def bytes_text(size: int) -> str:
    """The size with three digits in the largest unit of which there is one, such as 1.50 MiB."""
    unit = min(max(size.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    value = size / (1 << 10 * unit)
    return f"{size} B" if unit == 0 else f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {UNITS[unit]}"


def is_or_are(number: int) -> str:
    return "are" if number > 1 else "is"


def named(names: Sequence[str]) -> str:
    """The first of several names, and how many more there are."""
    shown = ", ".join(names[:NAMES_MAX])
    return shown if len(names) <= NAMES_MAX else f"{shown} and {len(names) - NAMES_MAX} more"


def in_words(reason: str, otherwise: str) -> str:
    """A caller's reason, shortened so that it can be kept and shown; `otherwise` where it is blank."""
    return reason.strip()[:REASON_CHARS_MAX] or otherwise


def joined(names: Sequence[str]) -> Iterator[str]:
    """One phrase that these joined, or none."""
    if names:
        yield f"{named(names)} joined"


def too_few(present: int, needed: int) -> str:
    return f"{counted(present, 'worker')} left; min_workers is {needed}"
