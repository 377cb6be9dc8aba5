"""What all workers of a job have to have in common to train together, and who has not.

Law: it is names and plain values, by part, such as the dataset; what they mean, others know. The first worker that says
anything settles it for the job, and who has something else is refused at the door, by name and with both values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forged.errors import RequestRefused
from forged.jobs.model import SettingValue

SharedConfig = dict[str, dict[str, SettingValue]]
"""The values of each part; a part that is not named is not there."""

PARTS_MAX = 8
VALUES_MAX = 32
CHARS_MAX = 200
FIX = "give all workers of the job the same, or this one to another job"


def check_shared_config(common: SharedConfig | None) -> None:
    """Refuse what is more than anybody has to say."""
    parts = (common or {}).items()
    texts = (text for name, part in parts for text in (name, *part, *part.values()) if isinstance(text, str))
    is_small = len(parts) <= PARTS_MAX and all(len(part) <= VALUES_MAX for _, part in parts)
    if not is_small or any(len(text) > CHARS_MAX for text in texts):
        raise RequestRefused(
            "shared_config_invalid", "what the workers are to have in common is too much", "give few values"
        )


def require_compatible(job: str, known: SharedConfig, given: SharedConfig) -> None:
    """Refuse who would train with something else than the job does."""
    for part in sorted(known.keys() | given.keys()):
        if part not in given:
            text = f"job {job} trains with a {part} ({_in_words(known[part])}), and this worker has none"
            raise RequestRefused(f"{part}_missing", text, f"give it the {part} that the others have")
        if part not in known:
            text = f"job {job} trains without a {part}, and this worker has one ({_in_words(given[part])})"
            raise RequestRefused(f"{part}_differs", text, FIX)
        if known[part] != given[part]:
            differences = "; ".join(_differences(known[part], given[part]))
            raise RequestRefused(f"{part}_differs", f"job {job} trains with another {part}: {differences}", FIX)


def _differences(known: Mapping[str, SettingValue], given: Mapping[str, SettingValue]) -> Iterator[str]:
    for name in sorted(known.keys() | given.keys()):
        if known.get(name) != given.get(name):
            yield f"{name} = {known.get(name)}, and {given.get(name)} here"


def _in_words(part: Mapping[str, SettingValue]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in part.items())
