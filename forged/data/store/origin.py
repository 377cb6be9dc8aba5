"""The port for a dataset's origin: where shards come from when no worker holds them.

Invariants:
- An origin writes all bytes of a shard, nothing else, and the same bytes each time. A shard that has samples has bytes.
- It runs in a thread of its own and may hang; its next `write` raises when the shard is no longer wanted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from forged.data.model import DataShard
from forged.errors import Problem, RequestRefused

COPY_BYTES = 1 << 20
ORIGIN_TIMEOUT_S = 600.0
"""Long, because an origin may download a whole shard before it writes the first byte."""


class ShardOrigin(Protocol):
    """A dataset that can be read shard by shard."""

    def write_to(self, shard: DataShard, file: BinaryIO) -> None:
        """Write the bytes of the shard."""
        ...


class FunctionOrigin:
    """A function that writes a shard to a file."""

    def __init__(self, function: Callable[[DataShard, BinaryIO], None]) -> None:
        self._function = function

    def write_to(self, shard: DataShard, file: BinaryIO) -> None:
        """Write the bytes of the shard."""
        self._function(shard, file)


class DirectoryOrigin:
    """A directory with one file for each shard."""

    def __init__(self, path: str | os.PathLike[str], name: str = "shard-{shard_id}") -> None:
        self._path = Path(path)
        self._name = name

    def write_to(self, shard: DataShard, file: BinaryIO) -> None:
        """Copy the shard's file."""
        name = self._name.format(shard_id=shard.shard_id)
        try:
            with (self._path / name).open("rb") as source:
                while piece := source.read(COPY_BYTES):
                    file.write(piece)
        except FileNotFoundError as error:
            raise RequestRefused(
                "shard_not_at_origin", f"{self._path} has no {name} for shard {shard.shard_id}", "put the file there"
            ) from error


def check_origin_timeout(seconds: object) -> float:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (is_number and 0 < cast("float", seconds) < math.inf):
        problem = Problem("origin_timeout_s", seconds, "a finite number of seconds above 0")
        raise RequestRefused("data_invalid", str(problem))
    return float(cast("float", seconds))
