"""The setting of a job that concerns GPU memory. The daemon's configuration has the default."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from forged.errors import Problem, RequestRefused
from forged.jobs.model import SettingValue
from forged.memory.pool.eviction import POLICIES

EVICTION = "memory_eviction"
SIMILARITY_MIN = 0.9
"""From this similarity on, an unknown key counts as misspelt."""


def require_valid(job: str, settings: Mapping[str, SettingValue]) -> None:
    """Refuse an invalid eviction policy, and a key that is probably misspelt; None is the daemon's default."""
    value = settings.get(EVICTION)
    if value is not None and value not in POLICIES:
        problem = Problem(EVICTION, value, f"{' or '.join(POLICIES)}, or none")
    elif misspelt := [key for key in get_close_matches(EVICTION, settings, 1, SIMILARITY_MIN) if key != EVICTION]:
        problem = Problem.unknown(misspelt[0], settings[misspelt[0]], (EVICTION,), EVICTION)
    else:
        return
    raise RequestRefused(
        "memory_settings_invalid", f"invalid settings for job {job[:80]}: {problem}", "see docs/memory.md"
    )


def eviction_of(settings: Mapping[str, SettingValue] | None, default: str) -> str:
    """The eviction policy of a job with these settings; a stored value that is not valid counts as absent."""
    own = (settings or {}).get(EVICTION)
    return own if isinstance(own, str) and own in POLICIES else default
