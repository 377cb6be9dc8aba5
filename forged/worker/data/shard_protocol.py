"""What two workers say to each other while one fetches shards from the other.

Law: the source sends exactly what it has announced, and then says whether the shard was changed meanwhile; bytes of a
shard that was are of no use. The fetcher says what it has already, and takes the rest only if it belongs to the same
stamp. A shard counts when all of it was found to be what its stamp says. Whoever says or sends anything else has
broken the protocol: the connection is of no more use, and the error names the shard. A shard that cannot be given is
refused, and the conversation goes on.

    fetcher: ShardWanted(shard, offset, size, checksum)
    source:  ShardComing(shard, size, checksum, offset), bytes, ShardSent(has_changed)     or Refused
    fetcher: the next ShardWanted, or it hangs up
"""

from __future__ import annotations

from collections.abc import Callable

from forged.data.store.port import ArrivingShard, Begun, OpenShard, Passage, ShardStore, Stamp, not_held
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable, from_wire
from forged.net.protocol.messages import TEXT_CHARS_MAX
from forged.worker.transport.dialogue_wire import PIECE_BYTES, HungUp, Wire
from forged.worker.transport.peer_messages import PeerMessage, Refused, ShardComing, ShardSent, ShardWanted

TURN_TIMEOUT_S = 60.0
"""How long a fetcher waits while the source has no thread for it."""
READING_TIMEOUT_S = 60.0
"""How long a fetcher may read nothing: it may be held back by its own rate limit."""
MOMENT_S = 0.02
"""How long the thread of a source waits for the next wish before others get it."""
TURN_BYTES = 256 << 20
"""After so many bytes others get the thread that gave them."""

Served = Callable[[int, str], None]
"""Told of every shard that was given, or why it was not."""


async def serve(wire: Wire, store: ShardStore | None) -> bool:
    """Give what is wanted, until nothing is for a moment, or others are to have their turn; False: nobody is there."""
    given = 0
    try:
        while given < TURN_BYTES:
            wanted = await wire.hear(MOMENT_S)
            if wanted is None:
                return True
            if not isinstance(wanted, ShardWanted):
                raise _unexpected(wanted, "a wish for a shard")
            given += await _grant(wire, store, wanted)
    except HungUp:
        return False
    return True


async def _grant(wire: Wire, store: ShardStore | None, wanted: ShardWanted) -> int:
    try:
        opened = _opened(store, wanted)
    except ForgedError as error:
        await wire.say(Refused(error.kind, error.code, error.message[:TEXT_CHARS_MAX], error.fix[:TEXT_CHARS_MAX]))
        return 0
    with opened:
        is_resumed = (wanted.size, wanted.checksum) == opened.stamp
        offset = wanted.offset if is_resumed else 0
        await wire.say(ShardComing(wanted.shard, *opened.stamp, offset))
        await wire.give(opened.fd, offset, opened.stamp.size - offset, READING_TIMEOUT_S)
        await wire.say(ShardSent(opened.has_changed()))
        return opened.stamp.size - offset


def _opened(store: ShardStore | None, wanted: ShardWanted) -> OpenShard:
    if store is None:
        raise not_held(wanted.shard)
    if wanted.offset > wanted.size:
        raise RequestRefused(
            "shard_offset_invalid",
            f"shard {wanted.shard} of {wanted.size} bytes is wanted from byte {wanted.offset} on",
            "go on from where it stopped",
        )
    return store.open(wanted.shard)


async def fetch(wire: Wire, shard: int, store: ShardStore, passage: Passage) -> Stamp:
    """Have a shard sent, and hold it."""
    begun = store.begun(shard)
    await wire.say(ShardWanted(shard) if begun is None else ShardWanted(shard, begun.offset, *begun.stamp))
    coming = await wire.hear(TURN_TIMEOUT_S)
    if isinstance(coming, Refused):
        raise from_wire(coming.kind, coming.code, coming.text, coming.fix)
    if coming is None:
        raise Unavailable("peer_timeout", f"shard {shard} was not sent within {TURN_TIMEOUT_S:g} s", "fetch it again")
    if not isinstance(coming, ShardComing) or not _fits(coming, shard, begun):
        raise _unexpected(coming, f"shard {shard} as it was wanted")
    stamp = Stamp(coming.size, coming.checksum)
    with store.receive(shard, stamp, coming.offset) as arriving:
        passage.begins(coming.offset, coming.size)
        await _take(wire, coming, arriving, passage)
        await _require_unchanged(wire, shard, arriving)
        return arriving.commit()


def _fits(coming: ShardComing, shard: int, begun: Begun | None) -> bool:
    """Whether it is what was asked for: a wish that was heard twice is answered twice, and later ones are not."""
    is_resumed = begun == Begun(Stamp(coming.size, coming.checksum), coming.offset)
    return coming.shard == shard and (coming.offset == 0 or is_resumed)


async def _take(wire: Wire, coming: ShardComing, arriving: ArrivingShard, passage: Passage) -> None:
    """Take it in pieces that begin at multiples of their length: a disk can take those as they are."""

    def absorb(data: memoryview) -> None:
        arriving.write(data)
        passage.moved(data.nbytes)

    at = coming.offset
    while at < coming.size:
        piece = min(PIECE_BYTES - at % PIECE_BYTES, coming.size - at)
        await wire.pause(passage.pause_before(piece))
        await wire.take(piece, absorb)
        at += piece


async def _require_unchanged(wire: Wire, shard: int, arriving: ArrivingShard) -> None:
    try:
        sent = await wire.hear(TURN_TIMEOUT_S)
        if not isinstance(sent, ShardSent):
            raise _unexpected(sent, f"the end of shard {shard}")
    except PeerError:
        # Whoever sends too much may have sent wrong bytes before.
        arriving.drop()
        raise
    if sent.has_changed:
        arriving.drop()
        raise RequestRefused("shard_changed", f"shard {shard} was changed while it was sent", "take another copy")


def _unexpected(said: PeerMessage | None, wanted: str) -> PeerError:
    what = "nothing" if said is None else type(said).__name__
    return PeerError("message_unexpected", f"the other worker said {what} where {wanted} belongs", "see its version")
