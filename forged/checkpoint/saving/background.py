"""Saves that go on while training does.

Law: one is written at a time, and one more may be staged; a third waits or is refused, and none is dropped. What went
wrong is raised to whoever asks for that save, or else at the next call, or else it is told on stderr when nobody can
ask any more. The ranks of one save need not meet: each leaves a receipt in the storage, and the root publishes when all
are there.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
from anyio import to_thread
from msgspec.structs import replace

from forged.checkpoint.coordinators import OutcomeUnknown, RankFailure
from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import Part
from forged.checkpoint.model import WhenBusy
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.saving.pipeline import RankSave, RunInfo, Saver
from forged.checkpoint.saving.receipts import OUTCOME_GRACE_S, RankWaiter, ReceiptExchange
from forged.errors import describe
from forged.log import SILENT, Log

SAVES_MAX = 2
"""One is written and one staged."""
POLL_S = 0.01
"""How often who waits for a save before his own looks whether he is to stop."""


@dataclass(slots=True, weakref_slot=True)
class SaveHandle:
    """A save that goes on. It is staged: what was saved may change."""

    prefix: str
    _durable: Future[None] = field(default_factory=Future)
    _committed: Future[str] = field(default_factory=Future)
    token: CancelToken = field(default_factory=CancelToken)
    _told: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # When the handle is gone, or at the end of the interpreter, which comes when all that is written is written.
        weakref.finalize(self, _tell, self.prefix, self._committed, self._told, os.getpid())

    @property
    def is_known(self) -> bool:
        """Whether somebody was told what became of it."""
        return self._told.is_set()

    @property
    def staged(self) -> bool:
        """Whether the state may change; always so, once there is a handle."""
        return True

    @property
    def is_durable(self) -> bool:
        """Whether what this rank writes would outlive a power cut."""
        return self._durable.done() and self._durable.exception() is None

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint is there."""
        return self._committed.done() and self._committed.exception() is None

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._committed.done()

    async def durable(self) -> None:
        """Wait until what this rank writes is durable."""
        await to_thread.run_sync(self._wait, self._durable, abandon_on_cancel=True)

    async def committed(self) -> str:
        """Wait until the checkpoint is there; returns its prefix."""
        await to_thread.run_sync(self._wait, self._committed, abandon_on_cancel=True)
        return self.prefix

    def result(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is there, without an event loop; returns its prefix."""
        self._wait(self._committed, timeout)
        return self.prefix

    def cancel(self) -> None:
        """Give it up, unless it is there already."""
        self.token.cancel()

    def failure(self) -> BaseException | None:
        """What went wrong, if it has ended so and nobody was told."""
        if self.is_known or not self._committed.done():
            return None
        self._told.set()
        return self._committed.exception()

    def _wait(self, future: Future[None] | Future[str], timeout: float | None = None) -> None:
        try:
            future.result(timeout)
        except TimeoutError:
            if not future.done():
                raise CheckpointException(
                    f"{self.prefix} was not saved within {timeout:g} s; it goes on", self.prefix, ExceptionType.TIMEOUT
                ) from None
            self._told.set()
            raise
        except BaseException:
            self._told.set()
            raise

    def durable_now(self) -> None:
        """What this rank writes is durable."""
        self._durable.set_result(None)

    def end(self, error: BaseException | None) -> None:
        """It has ended."""
        for future in (self._durable, self._committed):
            if not future.done() and error is not None:
                future.set_exception(error)
        if error is None:
            self._committed.set_result(self.prefix)


def _tell(prefix: str, committed: Future[str], told: threading.Event, pid: int) -> None:
    """Say on stderr that a save has failed of which nobody will hear otherwise."""
    if told.is_set() or not committed.done() or pid != os.getpid():
        return
    error = committed.exception()
    if error is not None and sys.stderr is not None:
        reason = " ".join(describe(error).split())
        with suppress(OSError, ValueError):
            print(f"forged: the checkpoint {prefix} was not saved: {reason}", file=sys.stderr, flush=True)


class BackgroundSaver:
    """Writes saves one after the other, each in a thread of its own, which the end of the interpreter waits for."""

    def __init__(
        self,
        saving: Saver,
        storage: Storage,
        release: Callable[[RankSave], None],
        members: Callable[[], Collection[str]] = tuple,
        log: Log = SILENT,
    ) -> None:
        """`members` are the names of the ranks that there are now, where they have some."""
        self._saving = saving
        self._storage = storage
        self._release = release
        self._members = members
        self._log = log
        self._slots = threading.Semaphore(SAVES_MAX)
        self._writers: list[threading.Thread] = []
        self._handles: list[SaveHandle] = []

    async def take_slot(self, when_busy: WhenBusy, token: CancelToken) -> None:
        """Be one of those that may be under way; `free_slot` gives it back if nothing comes of it."""
        while not self._slots.acquire(blocking=False):
            if when_busy is WhenBusy.REFUSE:
                raise CheckpointException(
                    "one save is being written and another is staged",
                    type=ExceptionType.SAVE_FAILED,
                    code="checkpoint_busy",
                    fix="save less often, or use when_busy = wait",
                    retryable=True,
                )
            token.check()
            await anyio.sleep(POLL_S)

    def free_slot(self) -> None:
        """Nothing came of a save."""
        self._slots.release()

    async def quiet(self, token: CancelToken) -> None:
        """Wait until nothing is under way."""
        while not all(handle.is_over for handle in self._handles):
            token.check()
            await anyio.sleep(POLL_S)

    def begin(self, work: RankSave, about: RunInfo, token: CancelToken) -> SaveHandle:
        """Write a staged save in the background."""
        handle = SaveHandle(work.terms.prefix, token=token)
        patience = RankWaiter(token, self._members, 0.0 if work.is_root else OUTCOME_GRACE_S)
        notes = ReceiptExchange(self._storage, work, patience)
        earlier = [one for one in self._writers if one.is_alive()]
        thread = threading.Thread(
            target=self._run, args=(earlier, handle, work, about, notes), name="checkpoint-save", daemon=False
        )
        thread.start()
        self._writers = [*earlier, thread]
        self._handles = [*(one for one in self._handles if not (one.is_over and one.is_known)), handle]
        return handle

    def failure(self) -> BaseException | None:
        """What went wrong in a save that nobody has asked for since."""
        return next((error for handle in self._handles if (error := handle.failure()) is not None), None)

    def close(self) -> None:
        """Wait until all is written."""
        for writer in self._writers:
            writer.join()

    def _run(
        self,
        earlier: Sequence[threading.Thread],
        handle: SaveHandle,
        work: RankSave,
        about: RunInfo,
        notes: ReceiptExchange,
    ) -> None:
        error: BaseException | None = None
        try:
            self._write(earlier, handle, work, about, notes)
        except BaseException as raised:  # noqa: BLE001 - it is raised to whoever asks
            error = RankFailure.of(raised).error(handle.prefix, ExceptionType.SAVE_FAILED, None)
            error.__cause__ = raised
            self._log.error("a checkpoint was not saved", prefix=handle.prefix, why=str(error))
        try:
            self._release(work)
        finally:
            handle.end(error)
            self._slots.release()

    def _write(
        self,
        earlier: Sequence[threading.Thread],
        handle: SaveHandle,
        work: RankSave,
        about: RunInfo,
        notes: ReceiptExchange,
    ) -> None:
        try:
            _wait_for(earlier, handle.token)
            part = self._saving.write(work, handle.token)
        except BaseException as error:
            self._give_up(work, notes, error)
            raise
        handle.durable_now()
        if work.is_root:
            self._publish(work, part, about, notes, handle.token)
        else:
            self._hand_in(work, part, notes)

    def _publish(self, work: RankSave, own: Part, about: RunInfo, notes: ReceiptExchange, token: CancelToken) -> None:
        try:
            written = [own, *notes.collect()]
            token.check()
            self._saving.publish(work, written, about, token)
        except BaseException as error:
            self._give_up(work, notes, error)
            raise
        self._discard(notes)

    def _hand_in(self, work: RankSave, part: Part, notes: ReceiptExchange) -> None:
        """Say what was written, and wait until the root has published, or has given up."""
        try:
            notes.hand_in(part)
            trouble = notes.verdict()
        except Exception as error:
            # The root may publish all the same, or has.
            unknown = replace(RankFailure.of(error), is_undecided=True)
            raise unknown.error(work.terms.prefix, ExceptionType.SAVE_FAILED, None) from error
        if trouble is not None:
            if not trouble.is_undecided:
                self._saving.roll_back(work)
            self._discard(notes)
            raise trouble.error(work.terms.prefix, ExceptionType.SAVE_FAILED, None)

    def _give_up(self, work: RankSave, notes: ReceiptExchange, error: BaseException) -> None:
        """Nothing will be published: delete what was written so far, and let the other ranks know."""
        if not isinstance(error, OutcomeUnknown):
            self._saving.roll_back(work)
        try:
            if work.is_root:
                notes.refuse(RankFailure.of(error))
            else:
                notes.hand_in(RankFailure.of(error))
                notes.verdict()
            self._discard(notes)
        except CheckpointException as why:
            self._log.warning("the other ranks were not told of a save that failed", why=str(why))

    def _discard(self, notes: ReceiptExchange) -> None:
        try:
            notes.discard()
        except CheckpointException as error:
            self._log.warning("notes of a save are left", why=str(error))


def _wait_for(earlier: Sequence[threading.Thread], token: CancelToken) -> None:
    """Wait for the saves before this one: of two, the later may have given up while the other is being written."""
    for one in earlier:
        while one.is_alive():
            one.join(POLL_S)
            token.check()
