"""The shared configuration: values that all workers of a job must agree on, such as the dataset.

Invariants:
- The values are plain and grouped in parts; this module does not interpret them.
- The first worker that declares a shared configuration settles it for the job. A worker that declares another one is
  refused when it registers, and the refusal names the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forged.errors import RequestRefused
from forged.jobs.model import SettingValue

SharedConfig = dict[str, dict[str, SettingValue]]
"""The values of each part; a part that is missing is not used."""

PARTS_MAX = 8
VALUES_MAX = 32
CHARS_MAX = 200
FIX = "use the same for all workers of the job, or another job for this worker"


def check_shared_config(shared_config: SharedConfig | None) -> None:
    """Refuse a shared configuration that is too large."""
    parts = (shared_config or {}).items()
    texts = (text for name, part in parts for text in (name, *part, *part.values()) if isinstance(text, str))
    is_small = len(parts) <= PARTS_MAX and all(len(part) <= VALUES_MAX for _, part in parts)
    if not is_small or any(len(text) > CHARS_MAX for text in texts):
        limits = f"at most {PARTS_MAX} parts of {VALUES_MAX} values of {CHARS_MAX} characters"
        raise RequestRefused("shared_config_invalid", "shared_config is too large", f"give {limits}")


def require_compatible(job: str, known: SharedConfig, given: SharedConfig) -> None:
    """Refuse a worker whose shared configuration differs from the job's."""
    for part in sorted(known.keys() | given.keys()):
        if part not in given:
            text = f"job {job} trains with a {part} ({_listed(known[part])}), this worker has none"
            raise RequestRefused(f"{part}_missing", text, f"give this worker the same {part}")
        if part not in known:
            text = f"job {job} trains without a {part}, this worker has one ({_listed(given[part])})"
            raise RequestRefused(f"{part}_differs", text, FIX)
        if known[part] != given[part]:
            differences = "; ".join(_differences(known[part], given[part]))
            raise RequestRefused(f"{part}_differs", f"job {job} trains with another {part}: {differences}", FIX)


def _differences(known: Mapping[str, SettingValue], given: Mapping[str, SettingValue]) -> Iterator[str]:
    for name in sorted(known.keys() | given.keys()):
        if known.get(name) != given.get(name):
            yield f"{name} is {known.get(name)} in the job, {given.get(name)} in this worker"


def _listed(part: Mapping[str, SettingValue]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in part.items())
