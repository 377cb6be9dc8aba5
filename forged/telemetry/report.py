"""What happens in the daemon, told to its log.

Law: telling costs next to nothing where nobody listens, and is bounded where too much happens: what is left out is
counted and told. Nothing of it can fail or hold up what it tells about.
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
from forged.telemetry.library_logs import LibraryLogs, adopted

FACTS_PER_S_MAX = 100.0
LOOK_INTERVAL_S = 1.0
TRACEBACKS_PER_MIN_MAX = 3
"""How often the same mistake is told with its traceback."""
MISTAKES_MAX = 256
"""How many different mistakes are told apart; the oldest is forgotten then."""
TRACEBACK_FRAMES_MAX = 40
TRACEBACK_CHARS_MAX = 8_000


class FactReport:
    """One line per fact, of each level at most so many per second."""

    def __init__(self, log: Log, clock: Clock, per_s_max: float) -> None:
        now = clock.monotonic()
        self._log = log
        self._now = clock.monotonic
        self._per_s_max = per_s_max
        # One for each level, so that many that are usual do not hide the one that matters.
        self._floods: Mapping[str, RateLimit] = {
            level: RateLimit(per_s_max, max(1.0, per_s_max), now) for level in LEVELS
        }

    def set_limit(self, per_s_max: float) -> None:
        """Tell so many per second from now on; none at all where it is 0."""
        self._per_s_max = per_s_max
        for flood in self._floods.values():
            flood.resize(per_s_max, max(1.0, per_s_max))

    def tell(self, records: Sequence[Record]) -> None:
        """Tell facts, as far as somebody listens and there is room."""
        if self._per_s_max <= 0:
            return
        now, hears = self._now(), self._log.hears
        for record in records:
            cls = FACTS.get(record.type, Fact)
            level = cls.level if cls.level in LEVELS else Fact.level
            if hears(level) and self._floods[level].admits(now):
                self._tell(record, level)

    def _tell(self, record: Record, level: str) -> None:
        try:
            fields = record.fields()
        except ForgedError as error:
            fields = {"id": record.id, "type": record.type, "unreadable": describe(error)}
        fields["fact_id"] = fields.pop("id")
        getattr(self._log, level)("fact", **fields)

    def look(self, now: float) -> None:
        """Tell how many were left out."""
        for level, flood in self._floods.items():
            if left_out := flood.count(now):
                why = f"more than {self._per_s_max:g} per second"
                self._log.warning("facts were not told", facts=left_out, their_level=level, why=why)


class StoreReport:
    """Tells when decisions can no longer be written, and when they can again."""

    def __init__(self, log: Log, ledger: Ledger) -> None:
        self._log = log
        self._ledger = ledger
        self._told: tuple[str, str] | None = None
        self._since = 0.0
        self._failures = ledger.failures

    def look(self, now: float) -> None:
        """Tell what has changed since the last time."""
        ledger = self._ledger
        trouble = ledger.unavailable or ledger.read_only
        if trouble is not None:
            self._tell_trouble(trouble, now)
        elif self._told is not None:
            self._log.info("decisions are written again", after_s=round(now - self._since, 1))
            self._told = None
        elif ledger.failures > self._failures:
            self._log.warning("state was read anew from the store", times=ledger.failures - self._failures)
        self._failures = ledger.failures

    def _tell_trouble(self, trouble: ForgedError, now: float) -> None:
        known, self._told = self._told, (trouble.code, trouble.message)
        if known == self._told:
            return
        if known is None:
            self._since = now
        self._log.error("decisions are not written", code=trouble.code, why=trouble.message, fix=trouble.fix)


class MistakeReport:
    """Tells exceptions that nobody expected, with their traceback; the same one only now and then."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._now = clock.monotonic
        self._floods: dict[tuple[str, str, str], RateLimit] = {}

    def tell(self, owner: str, error: BaseException) -> None:
        """Tell what was raised in somebody's code."""
        if not self._log.hears("error"):
            return
        now = self._now()
        key = (owner, type(error).__name__, _place(error))
        flood = self._floods.get(key)
        if flood is None:
            if len(self._floods) >= MISTAKES_MAX:
                del self._floods[next(iter(self._floods))]
            flood = self._floods[key] = RateLimit(TRACEBACKS_PER_MIN_MAX / 60, TRACEBACKS_PER_MIN_MAX, now)
        if flood.admits(now):
            self._log.error("a mistake in the code", owner=owner, exception=_traceback(error))

    def look(self, now: float) -> None:
        """Tell how often the same was not told."""
        for (owner, error, place), flood in self._floods.items():
            if left_out := flood.count(now):
                self._log.error("the same mistakes again", owner=owner, error=error, place=place, times=left_out)


class Reporter:
    """Tells the log of a daemon what happens in it. Make it before the bus is sealed, and `run` it."""

    def __init__(
        self, log: Log, bus: Bus, ledger: Ledger, clock: Clock, *, facts_per_s_max: float = FACTS_PER_S_MAX
    ) -> None:
        self.facts = FactReport(log, clock, facts_per_s_max)
        self.mistakes = MistakeReport(log, clock)
        self._store = StoreReport(log, ledger)
        self._complaints = LibraryLogs(log, self.mistakes.tell, clock)
        self._clock = clock
        # Not a handler of its own: for each fact a mailbox would cost more than looking whether it is to be told.
        bus.on_publish.append(self.facts.tell)
        bus.on_handler_bug = self.mistakes.tell

    def set_limits(self, *, facts_per_s_max: float) -> None:
        """Tell more, or less, from now on."""
        self.facts.set_limit(facts_per_s_max)

    async def run(self) -> None:
        """Look for what nobody says by himself, and hear what libraries complain about, for ever."""
        with adopted(self._complaints):
            while True:
                await anyio.sleep(LOOK_INTERVAL_S)
                self.look()

    def look(self) -> None:
        """Tell what has changed since the last time."""
        now = self._clock.monotonic()
        for report in (self._store, self.facts, self.mistakes, self._complaints):
            report.look(now)


def _place(error: BaseException) -> str:
    """Where it was raised."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        place = f"{frame.f_code.co_filename}:{line}"
    return place


def _traceback(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(error, limit=-TRACEBACK_FRAMES_MAX)).rstrip()
    except Exception:  # noqa: BLE001 - an exception is somebody else's code too
        text = describe(error)
    return text if len(text) <= TRACEBACK_CHARS_MAX else f"...{text[-TRACEBACK_CHARS_MAX:]}"
