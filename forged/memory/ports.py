"""What the memory service needs of the other services."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkersPort:
    """What is known of the workers of jobs."""

    is_registered: Callable[[str, str, bytes], bool]
    """Whether a worker is registered with a job as this process."""
    registered: Callable[[], Mapping[str, Iterable[tuple[str, bytes]]]]
    """By job: the ids and incarnations of all registered workers."""
    generation: Callable[[str], int] = lambda job: 0
