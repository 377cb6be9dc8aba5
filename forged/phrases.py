"""How many, and who, as sentences say it.

Law: what is read by people is a sentence for every number, also for none and for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

NAMES_MAX = 8
REASONS_MAX = 8
REASON_CHARS_MAX = 500


def counted(number: int, thing: str) -> str:
    """So many of a thing: no worker, 1 worker, 2 workers."""
    return f"{f'{number:,}' if number else 'no'} {thing}{'s' if number > 1 else ''}"


def is_or_are(number: int) -> str:
    """What so many do: no worker is, 1 is, 2 are."""
    return "are" if number > 1 else "is"


def named(names: Sequence[str]) -> str:
    """The first of several names, and how many more there are."""
    shown = ", ".join(names[:NAMES_MAX])
    return shown if len(names) <= NAMES_MAX else f"{shown} and {len(names) - NAMES_MAX} more"


def in_words(reason: str, otherwise: str) -> str:
    """A reason that somebody gave, as it can be kept and shown."""
    return reason.strip()[:REASON_CHARS_MAX] or otherwise


def joined(names: Sequence[str]) -> Iterator[str]:
    """That these have joined; nothing where nobody has."""
    if names:
        yield f"{named(names)} joined"


def too_few(there: int, needed: int) -> str:
    """That so many are not enough."""
    return f"{counted(there, 'worker')} {is_or_are(there)} left, and {needed} {is_or_are(needed)} needed"
