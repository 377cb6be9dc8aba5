"""Where a shard is to be had when no worker has it: the dataset itself.

Law: an origin writes the bytes of a shard, all of them and nothing else, the same ones each time, in a thread of its
own. It is asked last, and one whose writing is no longer wanted finds out at its next `write`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from forged.data.model import DataShard
from forged.data.store import ArrivingShard, Passage, ShardStore, Stamp
from forged.errors import ForgedError, RequestRefused, Unavailable, describe

PIECE_BYTES = 1 << 20

Wait = Callable[[float], None]


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
    """A directory that has a file for each shard."""

    def __init__(self, path: str | os.PathLike[str], name: str = "shard-{shard_id}") -> None:
        self._path = Path(path)
        self._name = name

    def write_to(self, shard: DataShard, file: BinaryIO) -> None:
        """Copy the shard's file."""
        name = self._name.format(shard_id=shard.shard_id)
        try:
            with (self._path / name).open("rb") as source:
                while piece := source.read(PIECE_BYTES):
                    file.write(piece)
        except FileNotFoundError as error:
            raise RequestRefused(
                "shard_not_at_origin", f"{self._path} has no {name} for shard {shard.shard_id}", "put it there"
            ) from error


def bring(origin: ShardOrigin, shard: DataShard, store: ShardStore, passage: Passage, wait: Wait) -> Stamp:
    """Have the origin write a shard into the store; `wait` slows it down."""
    with store.receive(shard.shard_id, None) as arriving:
        passage.begins(0, None)
        try:
            origin.write_to(shard, cast("BinaryIO", _Inlet(arriving, passage, wait)))
        except ForgedError:
            raise
        except Exception as error:
            raise Unavailable(
                "origin_failed", f"shard {shard.shard_id} cannot be had from its origin: {describe(error)}", "see there"
            ) from error
        return arriving.commit()


class _Inlet(io.RawIOBase):
    """The file that an origin writes to."""

    def __init__(self, arriving: ArrivingShard, passage: Passage, wait: Wait) -> None:
        self._arriving = arriving
        self._passage = passage
        self._wait = wait

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(cast("bytes", data)).cast("B")
        for start in range(0, view.nbytes, PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self._wait(self._passage.pause_before(piece.nbytes))
            self._arriving.write(piece)
            self._passage.moved(piece.nbytes)
        return view.nbytes
