"""Streams of facts to somebody outside, as their sender sees them.

Law: a stream is a position in the journal and a credit, nothing more; a reader that never reads costs nothing, and
holds nothing of the journal's past. It receives every fact it asked for once, in order, or a gap that says which it
missed. The streams of a connection have their turns one after the other.
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
"""How far a stream whose filter lets nothing through may advance before its reader is told the position."""
FILTER_NAMES_MAX = 256
STREAMS_MAX = 64
STREAM_TURNS = 8
"""How often the streams of a connection are advanced before the other connections have their turn."""
ALL_KEPT = -1

StreamMessage = Facts | GapMessage


class OutgoingStream:
    """What one subscription has been sent, and how much more it takes."""

    def __init__(self, request: Subscribe, journal: Journal, history: str, jobs: frozenset[str] | None) -> None:
        _check_filter("types", request.types)
        _check_filter("jobs", request.jobs)
        self.number = request.stream
        self._types = frozenset(request.types)
        self._jobs = frozenset(request.jobs)
        self._allowed = jobs
        self._credit = 0
        self._catching_up = True
        self._beginning: list[StreamMessage] = []
        self._told = self._position = self._start(request, journal, history)
        self._beginning.append(Facts(self.number, self._position, ()))
        self.grant(request.credit)

    def grant(self, facts: int) -> None:
        """The reader takes so many facts more."""
        if self._credit + facts > CREDIT_MAX:
            have = f"stream {self.number} has a credit of {self._credit}"
            raise PeerError("credit_overflow", f"{have}; {facts} more are over {CREDIT_MAX}", "grant what was taken")
        self._credit += facts

    def advance(self, journal: Journal) -> list[StreamMessage]:
        """The next messages to the reader, not more than a turn of the loop should take."""
        messages, self._beginning = self._beginning, []
        if self._credit == 0:
            # A gap can wait as facts do, and grows meanwhile: one is told, rather than one for each fact forgotten.
            return messages
        if self._position < journal.floor:
            messages.append(
                GapMessage(self.number, self._position + 1, journal.floor, "the journal no longer holds these facts")
            )
            self._told = self._position = journal.floor
        return messages + self._next(journal)

    def _next(self, journal: Journal) -> list[StreamMessage]:
        scanned = journal.after(self._position, SCAN_FACTS_MAX)
        batch: list[Raw] = []
        held = 0
        for record in scanned:
            if self._wants(record):
                full = len(batch) >= min(self._credit, BATCH_FACTS_MAX) or held + len(record.data) > BATCH_BYTES_MAX
                if batch and full:
                    break
                batch.append(Raw(record.data))
                held += len(record.data)
            self._position = record.id
        self._credit -= len(batch)
        if self._position - self._told < self._silent_ids(journal) and not batch:
            return []
        self._told = self._position
        return [Facts(self.number, self._position, tuple(batch))]

    def _silent_ids(self, journal: Journal) -> int:
        """How far the stream may get, while nothing is for its reader, before that is told the position.

        It is told when the stream has caught up for the first time: it may want the past only, and wait for its end.
        """
        if self._catching_up and self._position >= journal.last:
            self._catching_up = False
            return 1
        return PROGRESS_IDS

    def due(self, journal: Journal) -> bool:
        """Whether `advance` would get any further."""
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
            return journal.floor
        if request.history not in ("", history):
            return self._start_over("the daemon's history is another one now: its data directory was replaced", journal)
        if since > journal.last:
            return self._start_over(f"fact {since} is ahead of the newest fact, {journal.last}", journal)
        return since

    def _start_over(self, reason: str, journal: Journal) -> int:
        self._beginning.append(GapMessage(self.number, 0, journal.floor, reason))
        return journal.floor


class OutgoingStreams:
    """All streams of one connection."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._streams: dict[int, OutgoingStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def due(self) -> bool:
        """Whether there is anything to send."""
        return any(stream.due(self._journal) for stream in self._streams.values())

    def open(self, request: Subscribe, history: str, jobs: frozenset[str] | None) -> None:
        """Begin a stream, for somebody who is bound to these jobs."""
        number = request.stream
        if number in self._streams:
            raise PeerError("stream_taken", f"there is a stream {number} already", "number streams anew")
        if len(self._streams) >= STREAMS_MAX:
            many = f"there are {STREAMS_MAX} streams on this connection"
            raise RequestRefused("too_many_streams", many, "end those that are not read")
        self._streams[number] = OutgoingStream(request, self._journal, history, jobs)

    def grant(self, number: int, facts: int) -> None:
        """The reader of a stream takes so many facts more."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.grant(facts)

    def close(self, number: int) -> None:
        """A stream is no longer wanted."""
        self._streams.pop(number, None)

    def clear(self) -> None:
        """Nobody reads any more."""
        self._streams.clear()

    def turn(self) -> Iterator[list[StreamMessage]]:
        """What is sent next, stream by stream, until all have caught up or the others' turn has come."""
        due = deque(stream for stream in self._streams.values() if stream.due(self._journal))
        for _ in range(STREAM_TURNS):
            if not due:
                return
            stream = due.popleft()
            # Behind the others, here and the next time.
            self._streams[stream.number] = self._streams.pop(stream.number)
            yield stream.advance(self._journal)
            if stream.due(self._journal):
                due.append(stream)


def _check_filter(field: str, names: tuple[str, ...]) -> None:
    if len(names) > FILTER_NAMES_MAX or any(len(name) > NAME_LENGTH_MAX for name in names):
        raise RequestRefused(
            "filter_too_large",
            f"{field} has {len(names)} names, or one of more than {NAME_LENGTH_MAX} characters",
            f"name {FILTER_NAMES_MAX} at most, or none and choose from what comes",
        )
