"""Checks of what a training script passes, and what its launcher sets instead.

Invariants:
- Numbers of other libraries, such as numpy's, become Python's own.
- A number that is not finite, or is negative, is refused with the name of its field.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import Any, NamedTuple

from forged.errors import RequestRefused
from forged.net.protocol.messages import INTEGER_MAX


def rate(name: str, given: Any) -> float:
    """A finite number that is not negative, such as a learning rate."""
    try:
        value = math.nan if isinstance(given, str | bytes | bytearray) else float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise RequestRefused(
            "number_invalid",
            f"{name} must be finite and >= 0, got {shortened(given)}",
            "pass a number within these limits",
        )
    return value


def count(name: str, given: Any, *, at_least: int = 0) -> int:
    """An integer within limits, such as a number of samples."""
    try:
        value = operator.index(given)
    except TypeError:
        value = -1
    if not at_least <= value <= INTEGER_MAX:
        limits = f"an integer from {at_least} to {INTEGER_MAX}"
        raise RequestRefused(
            "number_invalid", f"{name} must be {limits}, got {shortened(given)}", "pass a number within these limits"
        )
    return value


class ReplicaGroup(NamedTuple):
    """The replica group of a worker."""

    name: str
    rank: int
    size: int


def replica_group(
    name: str | None, rank: int | None, size: int | None, environment: Mapping[str, str], launcher: str
) -> ReplicaGroup:
    """What the script passes, else what `forged launch --group-size` sets, else consecutive local ranks of a launcher.

    `launcher` names the process that has started the workers of this host.
    """
    settled = _set_count(environment, "FORGED_GROUP_SIZE")
    size = count("group_size", settled or 1 if size is None else size, at_least=1)
    if name is not None or rank is not None or size == 1:
        return ReplicaGroup(name or "", rank or 0, size)
    if settled == size:
        return ReplicaGroup(
            environment.get("FORGED_GROUP", ""), _set_count(environment, "FORGED_GROUP_RANK") or 0, size
        )
    local_rank, local_size = (_set_count(environment, name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if local_rank is None or local_size is None or local_size % size:
        raise RequestRefused(
            "group_invalid",
            f"the replica group of {size} workers is not known: LOCAL_WORLD_SIZE is {local_size}",
            "pass `group` and `group_rank`, or start the workers by `forged launch --group-size`",
        )
    return ReplicaGroup(f"{launcher}-{local_rank // size}", local_rank % size, size)


def _set_count(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    try:
        return count(name, int(text))
    except ValueError:
        return count(name, text)
