"""Writes facts, store failures and unexpected exceptions to the daemon's log.

Invariants:
- Lines are limited per second; omitted lines are counted and the count is logged.
- Reporting costs almost nothing below the log level, and never raises or blocks.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence

import anyio

from forged.clock import Clock
from forged.errors import ForgedError, describe
from forged.kernel.bus import Bus
from forged.kernel.ledger import Ledger
from forged.kernel.messages import FACTS, Fact, Record
from forged.log import LEVELS, Log
from forged.rate_limit import RateLimit
from forged.telemetry.library_logs import LibraryLogs, collected

FACTS_PER_S_MAX = 100.0
LOOK_INTERVAL_S = 1.0
TRACEBACKS_PER_MIN_MAX = 3
"""How often the same exception is logged with its traceback."""
EXCEPTIONS_MAX = 256
"""How many different exceptions are counted separately; the oldest is forgotten first."""
TRACEBACK_FRAMES_MAX = 40
TRACEBACK_CHARS_MAX = 8_000


class FactReport:
    """Logs one line per fact, at most `per_s_max` per second and level."""

    def __init__(self, log: Log, clock: Clock, per_s_max: float) -> None:
        now = clock.monotonic()
        self._log = log
        self._now = clock.monotonic
        self._per_s_max = per_s_max
        # One limit per level, so that many info facts do not displace a warning.
        self._limits: Mapping[str, RateLimit] = {
            level: RateLimit(per_s_max, max(1.0, per_s_max), now) for level in LEVELS
        }

    def set_limit(self, per_s_max: float) -> None:
        """Set the facts per second and level; 0 logs no facts."""
        self._per_s_max = per_s_max
        for limit in self._limits.values():
            limit.resize(per_s_max, max(1.0, per_s_max))

    def log(self, records: Sequence[Record]) -> None:
        if self._per_s_max <= 0:
            return
        now, hears = self._now(), self._log.hears
        for record in records:
            cls = FACTS.get(record.type, Fact)
            level = cls.level if cls.level in LEVELS else Fact.level
            if hears(level) and self._limits[level].admits(now):
                self._log_one(record, level)

    def _log_one(self, record: Record, level: str) -> None:
        try:
            fields = record.fields()
        except ForgedError as error:
            fields = {"id": record.id, "type": record.type, "unreadable": describe(error)}
        fields["fact_id"] = fields.pop("id")
        getattr(self._log, level)("fact", **fields)

    def look(self, now: float) -> None:
        """Log how many facts were left out."""
        for level, limit in self._limits.items():
            if omitted := limit.count(now):
                why = f"more than {self._per_s_max:g} per second"
                self._log.warning("facts left out of the log", facts=omitted, fact_level=level, reason=why)


class StoreReport:
    """Logs when the store stops and starts to accept decisions."""

    def __init__(self, log: Log, ledger: Ledger) -> None:
        self._log = log
        self._ledger = ledger
        self._reported: tuple[str, str] | None = None
        self._since = 0.0
        self._failures = ledger.failures

    def look(self, now: float) -> None:
        """Log the changes since the last call."""
        ledger = self._ledger
        error = ledger.unavailable or ledger.read_only
        if error is not None:
            self._report_failure(error, now)
        elif self._reported is not None:
            self._log.info("decisions can be written again", after_s=round(now - self._since, 1))
            self._reported = None
        elif ledger.failures > self._failures:
            self._log.warning("state reloaded from the store", times=ledger.failures - self._failures)
        self._failures = ledger.failures

    def _report_failure(self, error: ForgedError, now: float) -> None:
        known, self._reported = self._reported, (error.code, error.message)
        if known == self._reported:
            return
        if known is None:
            self._since = now
        self._log.error("decisions cannot be written", code=error.code, reason=error.message, fix=error.fix)


class ExceptionReport:
    """Logs unexpected exceptions with tracebacks, limited per place where they are raised."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._now = clock.monotonic
        self._limits: dict[tuple[str, str, str], RateLimit] = {}

    def log(self, owner: str, error: BaseException) -> None:
        if not self._log.hears("error"):
            return
        now = self._now()
        key = (owner, type(error).__name__, _place(error))
        limit = self._limits.get(key)
        if limit is None:
            if len(self._limits) >= EXCEPTIONS_MAX:
                del self._limits[next(iter(self._limits))]
            limit = self._limits[key] = RateLimit(TRACEBACKS_PER_MIN_MAX / 60, TRACEBACKS_PER_MIN_MAX, now)
        if limit.admits(now):
            self._log.error("unexpected exception", owner=owner, exception=_traceback(error))

    def look(self, now: float) -> None:
        """Log how often each exception was left out."""
        for (owner, error, place), limit in self._limits.items():
            if omitted := limit.count(now):
                self._log.error("repeated exceptions", owner=owner, error=error, place=place, times=omitted)


class Reporter:
    """Reports on a daemon to its log. Create it before the bus is sealed, then `run` it."""

    def __init__(
        self, log: Log, bus: Bus, ledger: Ledger, clock: Clock, *, facts_per_s_max: float = FACTS_PER_S_MAX
    ) -> None:
        self.facts = FactReport(log, clock, facts_per_s_max)
        self.exceptions = ExceptionReport(log, clock)
        self._store = StoreReport(log, ledger)
        self._library_logs = LibraryLogs(log, self.exceptions.log, clock)
        self._clock = clock
        # Not a handler: a mailbox per fact would cost more than the check of its level.
        bus.on_publish.append(self.facts.log)
        bus.on_handler_bug = self.exceptions.log

    def set_limits(self, *, facts_per_s_max: float) -> None:
        self.facts.set_limit(facts_per_s_max)

    async def run(self) -> None:
        """Report store changes and collect library logs, until cancelled."""
        with collected(self._library_logs):
            while True:
                await anyio.sleep(LOOK_INTERVAL_S)
                self.look()

    def look(self) -> None:
        """Log the changes since the last call."""
        now = self._clock.monotonic()
        for report in (self._store, self.facts, self.exceptions, self._library_logs):
            report.look(now)


def _place(error: BaseException) -> str:
    """The file and line that raised the exception."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        place = f"{frame.f_code.co_filename}:{line}"
    return place


def _traceback(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error, limit=-TRACEBACK_FRAMES_MAX)).rstrip()
    except Exception:  # noqa: BLE001 - an exception's own code may raise anything
        text = describe(error)
    return text if len(text) <= TRACEBACK_CHARS_MAX else f"...{text[-TRACEBACK_CHARS_MAX:]}"
