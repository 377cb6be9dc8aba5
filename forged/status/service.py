"""The status service: answers requests about the daemon, its handlers and its facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from forged.auth.model import Principal, Role
from forged.errors import RequestRefused
from forged.kernel.bus import Bus
from forged.kernel.bus.statistics import HandlerStatistics
from forged.kernel.journal import Journal
from forged.kernel.messages import Call, Decision, Nothing, Record
from forged.status.model import (
    HandlerView,
    ListHandlers,
    PingDaemon,
    ReadmitHandler,
    ReadStatus,
    Status,
    TellStory,
)

OWNER = "status"
STORY_BYTES_MAX = 1 << 20


class StatusService:
    """Serves the requests of `status.model`, except backups."""

    def __init__(self, bus: Bus, journal: Journal, read_status: Callable[[], Status]) -> None:
        self._bus = bus
        self._journal = journal
        bus.serve(PingDaemon, lambda *_: Nothing(), owner=OWNER)
        bus.serve(ReadStatus, lambda *_: read_status(), owner=OWNER)
        bus.serve(TellStory, self._tell_story, owner=OWNER)
        bus.serve(ListHandlers, lambda *_: list(self._handlers()), owner=OWNER)
        bus.serve(ReadmitHandler, self._readmit, owner=OWNER)

    def _tell_story(self, request: TellStory, call: Call) -> list[msgspec.Raw]:
        record = self._journal.get(request.fact_id)
        if record is None or not _visible(call.principal, record):
            kept = self._kept()
            raise RequestRefused("fact_unknown", f"unknown fact {request.fact_id}; {kept}", "see `forgectl events`")
        records: list[msgspec.Raw] = []
        size = 0
        for part in self._journal.story(request.fact_id):
            if not _visible(call.principal, part):
                continue
            size += len(part.data)
            if size > STORY_BYTES_MAX:
                break
            records.append(msgspec.Raw(part.data))
        return records

    def _kept(self) -> str:
        oldest = self._journal.first
        if oldest is None:
            return "the journal is empty"
        return f"the journal has facts {oldest.id} to {self._journal.last}"

    def _readmit(self, request: ReadmitHandler, call: Call) -> Decision[Nothing]:
        return self._bus.readmit(request.handler)

    def _handlers(self) -> Iterator[HandlerView]:
        for mailbox in self._bus.mailboxes.values():
            subscription = mailbox.subscription
            types = sorted(fact.__name__ for fact in subscription.types) or ["*"]
            yield _view(mailbox.name, "fact", types, mailbox.statistics, len(mailbox.queue), mailbox.quarantined)
        for follower in self._bus.followers.values():
            types = sorted(fact.__name__ for fact in follower.options.types) or ["*"]
            yield _view(follower.name, "follower", types, follower.statistics, follower.behind, follower.paused)
        for slot in self._bus.slots.values():
            yield _view(slot.name, "signal", [], slot.statistics)
        for request, route in self._bus.requests.routes.items():
            names = [route.owner, *(owner for owner, _ in route.wrappers)]
            yield _view(" < ".join(names), "request", [request.__name__], route.statistics)


def _visible(principal: Principal, record: Record) -> bool:
    return principal.may(Role.VIEWER, record.job or None)


def _view(
    name: str,
    kind: str,
    messages: list[str],
    statistics: HandlerStatistics,
    queued: int = 0,
    quarantined: bool = False,
) -> HandlerView:
    return HandlerView(
        name=name,
        kind=kind,
        messages=messages,
        queued=queued,
        handled=statistics.handled,
        failed=statistics.failed,
        dropped=statistics.dropped,
        quarantined=quarantined,
        p50_s=statistics.latency.quantile(0.5),
        p99_s=statistics.latency.quantile(0.99),
    )
