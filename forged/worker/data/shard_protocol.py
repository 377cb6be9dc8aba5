"""The protocol by which one worker fetches shards from another.

    fetcher: ShardWanted(shard, offset, size, checksum)
    source:  ShardComing(shard, size, checksum, offset), bytes, ShardSent(has_changed)     or Refused
    fetcher: the next ShardWanted, or it closes the connection

Invariants:
- The source sends exactly the announced bytes, then says whether the shard changed meanwhile; if so, the fetcher drops
  them.
- The fetcher states what it has stored, and resumes only if the source's stamp is the same.
- A shard is held when all of its bytes match its stamp.
- Any other message breaks the protocol and ends the connection; the error names the shard. A refusal of one shard does
  not end the connection.
"""

from __future__ import annotations

from forged.data.store.errors import not_held
from forged.data.store.port import ArrivingShard, FlowControl, OpenShard, PartialShard, ShardStore, Stamp
from forged.errors import ForgedError, PeerError, RequestRefused, Unavailable, from_wire
from forged.net.protocol.messages import TEXT_CHARS_MAX
from forged.worker.transport.dialogue_wire import PIECE_BYTES, DialogueWire, HungUp
from forged.worker.transport.peer_messages import PeerMessage, Refused, ShardComing, ShardSent, ShardWanted

TURN_TIMEOUT_S = 60.0
"""How long a fetcher waits until the source has a thread for it."""
READING_TIMEOUT_S = 60.0
"""How long a fetcher may read nothing; its own rate limit may hold it back."""
MOMENT_S = 0.02
"""How long a source's thread waits for the next request before it serves another connection."""
TURN_BYTES = 256 << 20
"""After so many bytes a source's thread serves another connection."""


async def serve(wire: DialogueWire, store: ShardStore | None) -> bool:
    """Answer requests until none comes for `MOMENT_S` or the turn is over; False when the fetcher has closed."""
    sent = 0
    try:
        while sent < TURN_BYTES:
            wanted = await wire.hear(MOMENT_S)
            if wanted is None:
                return True
            if not isinstance(wanted, ShardWanted):
                raise _unexpected(wanted, "a request for a shard")
            sent += await _answer(wire, store, wanted)
    except HungUp:
        return False
    return True


async def _answer(wire: DialogueWire, store: ShardStore | None, wanted: ShardWanted) -> int:
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
            f"offset must be at most the {wanted.size} bytes of shard {wanted.shard}, got {wanted.offset}",
            "resume where the last attempt stopped",
        )
    return store.open(wanted.shard)


async def fetch(wire: DialogueWire, shard: int, store: ShardStore, flow: FlowControl) -> Stamp:
    """Fetch a shard into the store, resuming what is stored of it, and verify it."""
    stored = store.partial(shard)
    await wire.say(ShardWanted(shard) if stored is None else ShardWanted(shard, stored.offset, *stored.stamp))
    coming = await wire.hear(TURN_TIMEOUT_S)
    if isinstance(coming, Refused):
        raise from_wire(coming.kind, coming.code, coming.text, coming.fix)
    if coming is None:
        raise Unavailable("peer_timeout", f"shard {shard} was not sent within {TURN_TIMEOUT_S:g} s", "fetch it again")
    if not isinstance(coming, ShardComing) or not _is_as_requested(coming, shard, stored):
        raise _unexpected(coming, f"shard {shard} as requested")
    stamp = Stamp(coming.size, coming.checksum)
    with store.receive(shard, stamp, coming.offset) as arriving:
        flow.started(coming.offset, coming.size)
        await _receive(wire, coming, arriving, flow)
        await _require_unchanged(wire, shard, arriving)
        return arriving.commit()


def _is_as_requested(coming: ShardComing, shard: int, stored: PartialShard | None) -> bool:
    is_resumed = stored == PartialShard(Stamp(coming.size, coming.checksum), coming.offset)
    return coming.shard == shard and (coming.offset == 0 or is_resumed)


async def _receive(wire: DialogueWire, coming: ShardComing, arriving: ArrivingShard, flow: FlowControl) -> None:
    """Receive in pieces that start at multiples of their size, which O_DIRECT can write."""
    at = coming.offset
    while at < coming.size:
        end = min(at - at % PIECE_BYTES + PIECE_BYTES, coming.size)
        await wire.pause(flow.delay_before(end - at))
        while at < end:
            data = await wire.take(end - at)
            arriving.write(data)
            flow.received(data.nbytes)
            at += data.nbytes


async def _require_unchanged(wire: DialogueWire, shard: int, arriving: ArrivingShard) -> None:
    try:
        sent = await wire.hear(TURN_TIMEOUT_S)
        if not isinstance(sent, ShardSent):
            raise _unexpected(sent, f"the end of shard {shard}")
    except PeerError:
        # A source that sent more than it announced may also have sent wrong bytes.
        arriving.drop()
        raise
    if sent.has_changed:
        arriving.drop()
        raise RequestRefused("shard_changed", f"shard {shard} was modified while it was sent", "fetch another copy")


def _unexpected(said: PeerMessage | None, wanted: str) -> PeerError:
    what = "nothing" if said is None else type(said).__name__
    return PeerError(
        "message_unexpected",
        f"expected {wanted} from the other worker, got {what}",
        "check which version of forged it runs",
    )
