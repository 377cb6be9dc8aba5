"""Where a shard is to be had when no worker has it: the dataset itself.

Law: an origin writes the bytes of a shard, all of them and nothing else, the same ones each time, in a thread of its
own. A shard that has samples has bytes, so one that writes none has failed. It is asked last, and one whose writing is
no longer wanted finds out at its next `write`. It may hang: then the shard is taken from it, and whatever it does later
touches nothing.
"""

from __future__ import annotations

import io
import math
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from forged.data.model import DataShard
from forged.data.store.port import ArrivingShard, Passage, ShardStore, Stamp
from forged.errors import ForgedError, Problem, RequestRefused, Unavailable, describe

PIECE_BYTES = 1 << 20
ORIGIN_TIMEOUT_S = 600.0
"""For so long an origin may give nothing: it may fetch all of a shard before it writes any of it."""

Wait = Callable[[float], None]
Now = Callable[[], float]


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


class Bringing:
    """One attempt to have a shard from its origin: made by one thread, and watched by another that may give it up.

    Whoever does something with what arrives in the store holds the lock meanwhile. So who gives up takes the shard from
    a thread that is with the origin, at once, and leaves it to one that is with the store, which is back soon.
    """

    def __init__(
        self, origin: ShardOrigin, shard: DataShard, store: ShardStore, passage: Passage, wait: Wait, now: Now
    ) -> None:
        self.shard_id = shard.shard_id
        self._origin = origin
        self._shard = shard
        self._store = store
        self._passage = passage
        self._wait = wait
        self._now = now
        self._lock = threading.Lock()
        self._arriving: ArrivingShard | None = None
        self._given_up_at = math.inf
        self._is_over = False
        self._has_given = False
        self._heard_at = math.inf
        """Since when the origin has had the word, and given nothing; infinity: it is not the one that is waited for."""

    def run(self) -> Stamp:
        """Have the origin write the shard into the store."""
        with self._begun() as file:
            # Whatever it raises is its own: what cancels or exits something else than this thread, too.
            with _translated(self.shard_id, BaseException):
                self._origin.write_to(self._shard, file)
            return self._commit()

    async def run_here(self) -> Stamp:
        """The same in a simulation, which has no threads: there an origin may hang in what it returns."""
        with self._begun() as file:
            with _translated(self.shard_id):
                rest = cast("Callable[..., Awaitable[None] | None]", self._origin.write_to)(self._shard, file)
                if rest is not None:
                    await rest
            return self._commit()

    @property
    def is_given_up(self) -> bool:
        """Whether the shard is no longer wanted from here."""
        return self._given_up_at < math.inf

    def silent_s(self) -> float:
        """For how long nothing has come of this: the origin is silent, or it was given up."""
        return max(0.0, self._now() - min(self._heard_at, self._given_up_at))

    def origin_silent_s(self) -> float | None:
        """For how long the origin is silent; None: the thread is not with it."""
        heard_at = self._heard_at
        return None if heard_at == math.inf else max(0.0, self._now() - heard_at)

    def give_up(self) -> None:
        """Let others bring the shard; may be called from any thread, and more than once."""
        self._given_up_at = min(self._given_up_at, self._now())
        if self._lock.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._lock.release()

    @contextmanager
    def _begun(self) -> Iterator[BinaryIO]:
        try:
            with self._lock:
                self._require_wanted()
                self._arriving = self._store.receive(self.shard_id, None)
            self._require_wanted()
            self._passage.begins(0, None)
            self._heard_at = self._now()
            yield cast("BinaryIO", _Inlet(self._take))
        finally:
            self._heard_at = math.inf
            with self._lock:
                self._is_over = True
                self._let_go()

    def _commit(self) -> Stamp:
        self._heard_at = math.inf
        self._require_something()
        with self._lock:
            return self._here().commit()

    def _require_something(self) -> None:
        """Who returns without a byte has not found the shard, and does not say so."""
        if self._shard.size and not self._has_given:
            raise Unavailable(
                "origin_empty", f"the origin gave no byte of shard {self.shard_id}, which has samples", "see there"
            )

    def _take(self, view: memoryview) -> None:
        self._require_wanted()
        self._heard_at = math.inf
        try:
            for start in range(0, view.nbytes, PIECE_BYTES):
                self._put(view[start : start + PIECE_BYTES])
        finally:
            self._heard_at = self._now()

    def _put(self, piece: memoryview) -> None:
        self._wait(self._passage.pause_before(piece.nbytes))
        with self._lock:
            self._here().write(piece)
        self._has_given = True
        if self.is_given_up:
            # Who gave it up has left it to this thread, and the origin may hang again.
            self.give_up()
            self._require_wanted()
        self._passage.moved(piece.nbytes)

    def _here(self) -> ArrivingShard:
        self._require_wanted()
        assert self._arriving is not None
        return self._arriving

    def _require_wanted(self) -> None:
        if self.is_given_up or self._is_over:
            raise Unavailable("transfer_stopped", f"shard {self.shard_id} is no longer wanted from here", "")

    def _let_go(self) -> None:
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.close()


def check_origin_timeout(seconds: object) -> float:
    """For how long an origin may give nothing, if it can be that."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not (is_number and 0 < cast("float", seconds) < math.inf):
        problem = Problem("origin_timeout_s", seconds, "a number of seconds above 0, and finite")
        raise RequestRefused("data_invalid", str(problem))
    return float(cast("float", seconds))


@contextmanager
def _translated(shard_id: int, kind: type[BaseException] = Exception) -> Iterator[None]:
    try:
        yield
    except ForgedError:
        raise
    except kind as error:
        text = f"the origin failed over shard {shard_id}: {describe(error)}"
        raise Unavailable("origin_failed", text, "mend the dataset's origin: it is asked again") from error


class _Inlet(io.RawIOBase):
    """The file that an origin writes to."""

    def __init__(self, take: Callable[[memoryview], None]) -> None:
        self._take = take

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(cast("bytes", data)).cast("B")
        if view.nbytes:
            self._take(view)
        return view.nbytes
