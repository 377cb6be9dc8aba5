"""The sender's side of fact streams to subscribed clients.

Invariants:
- A stream is a position in the journal and a credit; a client that does not read costs nothing.
- A client receives every matching fact once, in id order, or a gap with the ids that were dropped.
- The streams of a connection are served in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from msgspec import Raw

from forged.errors import PeerError, RequestRefused
from forged.ids import NAME_LENGTH_MAX
from forged.kernel.journal import Journal
from forged.kernel.messages import Record
from forged.net.protocol.messages import CREDIT_MAX, Facts, GapMessage, Subscribe

BATCH_FACTS_MAX = 256
BATCH_BYTES_MAX = 256 << 10
SCAN_FACTS_MAX = 1024
PROGRESS_IDS = 1024
"""After this many ids without a match the client is sent the position."""
FILTER_NAMES_MAX = 256
STREAMS_MAX = 64
STREAM_BYTES = 2048
"""What a stream holds besides its filter."""
NAME_BYTES = 128
"""What a name of a filter holds besides its characters."""
STREAM_TURNS = 8
"""The number of stream turns of a connection before other connections are served."""
ALL_KEPT = -1

StreamMessage = Facts | GapMessage


class OutgoingStream:
    """The position and credit of one subscription."""

    def __init__(self, request: Subscribe, journal: Journal, history: str, jobs: frozenset[str] | None) -> None:
        _check_filter("types", request.types)
        _check_filter("jobs", request.jobs)
        self.number = request.stream
        self.bytes = _bytes_held(request)
        """The bytes that the stream holds, about."""
        self._types = frozenset(request.types)
        self._jobs = frozenset(request.jobs)
        self._allowed = jobs
        self._visible = _visible(self._jobs, jobs)
        self._credit = 0
        self._catching_up = True
        self._beginning: list[StreamMessage] = []
        self._drops_before = -1
        """The journal's `drops` when the stream began with the oldest kept fact: earlier drops are no gap in it."""
        self._sent_position = self._position = self._start(request, journal, history)
        self._beginning.append(Facts(self.number, self._position, ()))
        self.grant(request.credit)

    def grant(self, facts: int) -> None:
        """Add credit."""
        if self._credit + facts > CREDIT_MAX:
            total = f"stream {self.number} has credit {self._credit}, and {facts} more would exceed {CREDIT_MAX}"
            raise PeerError("credit_overflow", total, "grant only what was consumed")
        self._credit += facts

    def advance(self, journal: Journal) -> list[StreamMessage]:
        """The next messages to the client, bounded for one turn of the loop."""
        messages, self._beginning = self._beginning, []
        if self._credit == 0:
            # A gap waits for credit too: it grows meanwhile, so one gap is sent instead of one per dropped fact.
            return messages
        floor = journal.floor_of(self._visible) if self._position < journal.floor else 0
        scanned = journal.after(self._position, SCAN_FACTS_MAX)
        batch: list[Raw] = []
        size = 0
        for record in scanned:
            if self._position < floor and (dropped := min(journal.dropped_before(record.id), floor)) > self._position:
                if batch:
                    break
                self._miss(messages, dropped, journal.drops_before(record.id))
            if self._wants(record):
                full = len(batch) >= min(self._credit, BATCH_FACTS_MAX) or size + len(record.data) > BATCH_BYTES_MAX
                if batch and full:
                    break
                batch.append(Raw(record.data))
                size += len(record.data)
            self._position = record.id
        if not scanned and self._position < floor:
            self._miss(messages, floor, journal.drops)
        self._credit -= len(batch)
        if batch or self._position - self._sent_position >= self._silent_ids(journal):
            self._sent_position = self._position
            messages.append(Facts(self.number, self._position, tuple(batch)))
        return messages

    def _miss(self, messages: list[StreamMessage], dropped: int, drops: int) -> None:
        """Report that facts up to this id were dropped, the last of them when the journal's `drops` became this.

        A gap that follows another one extends it.
        """
        first = self._position + 1
        if messages and isinstance(before := messages[-1], GapMessage):
            first = before.first
            messages.pop()
        self._sent_position = self._position = dropped
        if drops > self._drops_before:
            messages.append(GapMessage(self.number, first, dropped, "the journal no longer holds these facts"))

    def _silent_ids(self, journal: Journal) -> int:
        """The number of ids without a match after which the position is sent.

        When the stream catches up for the first time the position is sent at once: a client that reads only the past
        waits for it.
        """
        if self._catching_up and self._position >= journal.last:
            self._catching_up = False
            return 1
        return PROGRESS_IDS

    def due(self, journal: Journal) -> bool:
        """Whether `advance` has messages."""
        return bool(self._beginning) or (self._credit > 0 and self._position < journal.last)

    def _wants(self, record: Record) -> bool:
        return (
            (not self._types or record.type in self._types)
            and (not self._jobs or record.job in self._jobs)
            and (self._allowed is None or record.job in self._allowed)
        )

    def _start(self, request: Subscribe, journal: Journal, history: str) -> int:
        since = request.since
        if since is None:
            return journal.last
        if since == ALL_KEPT:
            return self._start_of(journal)
        if request.history not in ("", history):
            return self._start_over("the daemon has another history: its data directory was replaced", journal)
        if since > journal.last:
            return self._start_over(f"fact {since} is ahead of the newest fact, {journal.last}", journal)
        return since

    def _start_over(self, reason: str, journal: Journal) -> int:
        start = self._start_of(journal)
        self._beginning.append(GapMessage(self.number, 0, start, reason))
        return start

    def _start_of(self, journal: Journal) -> int:
        """The position before the oldest kept fact."""
        self._drops_before = journal.drops
        return journal.floor if journal.first is None else min(journal.floor, journal.first.id - 1)


class OutgoingStreams:
    """The streams of one connection."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._streams: dict[int, OutgoingStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def due(self) -> bool:
        """Whether there are messages to send."""
        return any(stream.due(self._journal) for stream in self._streams.values())

    def open(self, request: Subscribe, history: str, jobs: frozenset[str] | None) -> int:
        """Open a stream and return the bytes that it holds; `jobs` are those that the principal may see."""
        number = request.stream
        if number in self._streams:
            raise PeerError("stream_taken", f"stream {number} is open already", "use another number")
        if len(self._streams) >= STREAMS_MAX:
            many = f"this connection has {STREAMS_MAX} streams, the maximum"
            raise RequestRefused("too_many_streams", many, "end streams that are not read")
        stream = self._streams[number] = OutgoingStream(request, self._journal, history, jobs)
        return stream.bytes

    def grant(self, number: int, facts: int) -> None:
        """Add credit to a stream."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.grant(facts)

    def close(self, number: int) -> int:
        """Close a stream; returns the bytes that it held."""
        stream = self._streams.pop(number, None)
        return stream.bytes if stream is not None else 0

    def clear(self) -> None:
        """Close all streams."""
        self._streams.clear()

    def turn(self) -> Iterator[list[StreamMessage]]:
        """The next messages, stream by stream, until all have caught up or the turn ends."""
        due = deque(stream for stream in self._streams.values() if stream.due(self._journal))
        for _ in range(STREAM_TURNS):
            if not due:
                return
            stream = due.popleft()
            # Move the stream behind the other streams for this and the next turn.
            self._streams[stream.number] = self._streams.pop(stream.number)
            yield stream.advance(self._journal)
            if stream.due(self._journal):
                due.append(stream)


def _bytes_held(request: Subscribe) -> int:
    names = (*request.types, *request.jobs)
    return STREAM_BYTES + len(names) * NAME_BYTES + sum(map(len, names))


def _visible(jobs: frozenset[str], allowed: frozenset[str] | None) -> frozenset[str] | None:
    """The jobs whose facts a stream carries; None for all."""
    if allowed is None:
        return jobs or None
    return jobs & allowed if jobs else allowed


def _check_filter(field: str, names: tuple[str, ...]) -> None:
    if len(names) > FILTER_NAMES_MAX or any(len(name) > NAME_LENGTH_MAX for name in names):
        raise RequestRefused(
            "filter_too_large",
            f"{field} must have at most {FILTER_NAMES_MAX} names of {NAME_LENGTH_MAX} characters, got {len(names)}",
            "subscribe without a filter, and filter the received facts",
        )
