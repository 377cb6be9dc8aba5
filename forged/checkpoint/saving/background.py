"""Saves in the background: a staged state is written and published while training goes on.

Invariants:
- At most one save is written and one more is staged. A third waits or is refused; none is dropped.
- A failure is raised to the caller that waits for the save, else at the next call, else printed to stderr when the
  handle is collected.
- The ranks do not meet: each reports its durable part with a receipt, and the root publishes when it has all receipts.
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
from functools import partial

from msgspec.structs import replace

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.format.manifest import Part
from forged.checkpoint.model import WhenBusy
from forged.checkpoint.ports import CancelToken, HostAway, Storage
from forged.checkpoint.rank_group import OutcomeUnknown, RankFailure
from forged.checkpoint.saving.files.slots import Slots
from forged.checkpoint.saving.pipeline import Saver
from forged.checkpoint.saving.rank_save import RankSave, RunInfo
from forged.checkpoint.saving.receipts import OUTCOME_GRACE_S, RankWaiter, ReceiptExchange
from forged.checkpoint.thread_calls import pause, wait_in_thread
from forged.errors import describe
from forged.log import SILENT, Log

SAVES_MAX = 2
"""One is written and one is staged."""
POLL_S = 0.01
BUSY = "checkpoint_busy"


@dataclass(slots=True, weakref_slot=True)
class SaveHandle:
    """A save in the background. Its state is staged: the arrays may change."""

    prefix: str
    _durable: Future[None] = field(default_factory=Future)
    _committed: Future[str] = field(default_factory=Future)
    token: CancelToken = field(default_factory=CancelToken)
    _reported: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # Runs when the handle is collected, or at the interpreter's exit, which waits for the writers.
        weakref.finalize(self, _report_unseen, self.prefix, self._committed, self._reported, os.getpid())

    @property
    def is_reported(self) -> bool:
        """Whether a caller has received the outcome."""
        return self._reported.is_set()

    @property
    def staged(self) -> bool:
        """Whether the arrays may change; always true, because a handle is returned after staging."""
        return True

    @property
    def is_durable(self) -> bool:
        """Whether this rank's part survives a power cut."""
        return self._durable.done() and self._durable.exception() is None

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint exists."""
        return self._committed.done() and self._committed.exception() is None

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, with or without success."""
        return self._committed.done()

    async def durable(self) -> None:
        """Wait until this rank's part is durable."""
        await wait_in_thread(partial(self._wait, self._durable))

    async def committed(self) -> str:
        """Wait until the checkpoint exists; returns its prefix."""
        await wait_in_thread(partial(self._wait, self._committed))
        return self.prefix

    def result(self, timeout: float | None = None) -> str:
        """Wait, without an event loop, until the checkpoint exists; returns its prefix."""
        self._wait(self._committed, timeout)
        return self.prefix

    def cancel(self) -> None:
        """Cancel the save, unless the checkpoint exists already."""
        self.token.cancel()

    def failure(self) -> BaseException | None:
        """The save's error if it has failed and no caller has received that yet."""
        if self.is_reported or not self._committed.done():
            return None
        self._reported.set()
        return self._committed.exception()

    def _wait(self, future: Future[None] | Future[str], timeout: float | None = None) -> None:
        try:
            future.result(timeout)
        except TimeoutError:
            if not future.done():
                raise CheckpointException(
                    f"{self.prefix} was not saved within {timeout:g} s; the save continues",
                    self.prefix,
                    ExceptionType.TIMEOUT,
                ) from None
            self._reported.set()
            raise
        except BaseException:
            self._reported.set()
            raise

    def set_durable(self) -> None:
        """This rank's part is durable."""
        self._durable.set_result(None)

    def end(self, error: BaseException | None) -> None:
        """The save has ended: the checkpoint exists, or `error` says why not."""
        for future in (self._durable, self._committed):
            if not future.done() and error is not None:
                future.set_exception(error)
        if error is None:
            self._committed.set_result(self.prefix)


def _report_unseen(prefix: str, committed: Future[str], reported: threading.Event, pid: int) -> None:
    """Print the error of a failed save that no caller has received."""
    if reported.is_set() or not committed.done() or pid != os.getpid():
        return
    error = committed.exception()
    if error is not None and sys.stderr is not None:
        reason = " ".join(describe(error).split())
        with suppress(OSError, ValueError):
            print(f"forged: checkpoint {prefix} was not saved: {reason}", file=sys.stderr, flush=True)


class BackgroundSaver:
    """Writes staged saves one after the other, each in a thread of its own that the interpreter's exit waits for."""

    def __init__(
        self,
        saver: Saver,
        storage: Storage,
        unstage: Callable[[RankSave], None],
        members: Callable[[], Collection[str]] = tuple,
        log: Log = SILENT,
        slots: Slots | None = None,
    ) -> None:
        """`unstage` returns the memory of a written save; `members` returns the names of the present ranks, if any.

        `slots` are those of this process, if its host has any for it.
        """
        self._slots_of_host = slots
        self._saver = saver
        self._storage = storage
        self._unstage = unstage
        self._members = members
        self._log = log
        self._slots = threading.Semaphore(SAVES_MAX)
        self._writers: list[threading.Thread] = []
        self._handles: list[SaveHandle] = []

    async def take_slot(self, when_busy: WhenBusy, token: CancelToken) -> None:
        """Wait for one of the `SAVES_MAX` slots. `start` or `free_slot` takes it over."""
        while not self._slots.acquire(blocking=False):
            if when_busy is WhenBusy.REFUSE:
                raise CheckpointException(
                    "one save is being written and another is staged",
                    type=ExceptionType.SAVE_FAILED,
                    code=BUSY,
                    fix="save less often, or use when_busy = wait",
                    retryable=True,
                )
            await pause(POLL_S, token)

    def free_slot(self) -> None:
        """Give back the slot of a save that was not started."""
        self._slots.release()

    async def wait_idle(self, token: CancelToken) -> None:
        """Wait until no save is in progress."""
        while not all(handle.is_done for handle in self._handles):
            await pause(POLL_S, token)

    def start(self, save: RankSave, run: RunInfo, token: CancelToken) -> SaveHandle:
        """Start the thread that writes a staged save."""
        handle = SaveHandle(save.agreement.prefix, token=token)
        waiter = RankWaiter(token, self._members, 0.0 if save.is_root else OUTCOME_GRACE_S)
        receipts = ReceiptExchange(self._storage, save, waiter)
        earlier = [one for one in self._writers if one.is_alive()]
        thread = threading.Thread(
            target=self._run, args=(earlier, handle, save, run, receipts), name="checkpoint-save", daemon=False
        )
        thread.start()
        self._writers = [*earlier, thread]
        self._handles = [*(one for one in self._handles if not (one.is_done and one.is_reported)), handle]
        return handle

    def failure(self) -> BaseException | None:
        """The error of a failed save that no caller has received yet."""
        return next((error for handle in self._handles if (error := handle.failure()) is not None), None)

    def close(self) -> None:
        """Wait until all saves have ended."""
        for writer in self._writers:
            writer.join()

    # In the thread of a save: write, report, publish or wait for the root.

    def _run(
        self,
        earlier: Sequence[threading.Thread],
        handle: SaveHandle,
        save: RankSave,
        run: RunInfo,
        receipts: ReceiptExchange,
    ) -> None:
        error: BaseException | None = None
        try:
            written = self._write(earlier, handle, save, receipts)
            if written is not None:
                handle.set_durable()
            if save.is_root:
                self._publish(save, written, run, receipts, handle.token)
            else:
                self._report(save, written, receipts, handle.token)
            if written is None:
                handle.set_durable()
        except BaseException as raised:  # noqa: BLE001 - the handle raises it
            error = RankFailure.of(raised).error(handle.prefix, ExceptionType.SAVE_FAILED, None)
            error.__cause__ = raised
            self._log.error("a checkpoint was not saved", prefix=handle.prefix, reason=str(error))
        try:
            self._unstage(save)
        finally:
            handle.end(error)
            self._slots.release()

    def _write(
        self,
        earlier: Sequence[threading.Thread],
        handle: SaveHandle,
        save: RankSave,
        receipts: ReceiptExchange,
    ) -> list[Part] | None:
        """Write this rank's part after the earlier saves have ended; None if the host writes all parts."""
        try:
            _join(earlier, handle.token)
            if save.is_persisted_by_host:
                return None
            return self._saver.write(save, handle.token)
        except BaseException as error:
            self._abort(save, receipts, error)
            raise

    def _publish(
        self, save: RankSave, own: list[Part] | None, run: RunInfo, receipts: ReceiptExchange, token: CancelToken
    ) -> None:
        """At the root: collect the receipts, and publish the manifest; or have the host write everything."""
        was_host_asked = own is None
        try:
            if own is None:
                own = self._persist(save, receipts, token)
            if own is not None:
                written = [*own, *receipts.collect()]
                token.check()
                self._saver.publish(save, written, run, token)
        except BaseException as error:
            if not (was_host_asked and self._has_host_published(save, receipts)):
                self._abort(save, receipts, error)
                raise
            self._saver.roll_back(save)
        self._delete_receipts(receipts)

    def _has_host_published(self, save: RankSave, receipts: ReceiptExchange) -> bool:
        """Whether a host that was away has published the save that the ranks have written as well; reports it."""
        try:
            manifest = receipts.published()
        except CheckpointException:
            return False
        if manifest is None or {part.file for part in manifest.parts} & {*map(save.file, range(save.world_size))}:
            return False
        if save.report is not None:
            save.report.committed(manifest.size_bytes)
        return True

    def _persist(self, save: RankSave, receipts: ReceiptExchange, token: CancelToken) -> list[Part] | None:
        """At the root: have the host save the checkpoint from the slots of all ranks.

        If the host is away, the ranks write their parts; returns this rank's.
        """
        assert self._slots_of_host is not None
        try:
            size_bytes = self._slots_of_host.persist(save.agreement.save_id, token)
        except OutcomeUnknown:
            raise
        except HostAway as error:
            self._log.info(
                "the ranks write a checkpoint that the daemon was to write",
                prefix=save.agreement.prefix,
                reason=str(error),
            )
            save.is_persisted_by_host = False
            receipts.request_writing()
            return self._saver.write(save, token)
        except Exception:
            # The host may have saved it before, and have freed the slots.
            published = receipts.published()
            if published is None:
                raise
            size_bytes = published.size_bytes
        if save.report is not None:
            save.report.committed(size_bytes)
        return None

    def _refusal_of_host(self, save: RankSave) -> CheckpointException | None:
        assert self._slots_of_host is not None
        return self._slots_of_host.refusal_of(save.agreement.save_id)

    def _report(
        self, save: RankSave, written: list[Part] | None, receipts: ReceiptExchange, token: CancelToken
    ) -> None:
        """At another rank: write the receipt, and wait until the root has published or refused."""
        try:
            if written is None and receipts.wait_for_request(partial(self._refusal_of_host, save)):
                save.is_persisted_by_host = False
                written = self._saver.write(save, token)
            if written is not None:
                receipts.report(written)
            refusal = receipts.wait_for_outcome()
        except Exception as error:
            # The root may have published, or may do so later.
            unknown = replace(RankFailure.of(error), is_undecided=True)
            raise unknown.error(save.agreement.prefix, ExceptionType.SAVE_FAILED, None) from error
        if refusal is not None:
            if not refusal.is_undecided and not save.is_persisted_by_host:
                self._saver.roll_back(save)
            self._delete_receipts(receipts)
            raise refusal.error(save.agreement.prefix, ExceptionType.SAVE_FAILED, None)

    def _abort(self, save: RankSave, receipts: ReceiptExchange, error: BaseException) -> None:
        """Delete what was written, and tell the other ranks that there will be no checkpoint."""
        if not isinstance(error, OutcomeUnknown):
            if not save.is_persisted_by_host:
                self._saver.roll_back(save)
            if save.report is not None:
                save.report.failed(error)
        try:
            if save.is_root:
                receipts.refuse(RankFailure.of(error))
            elif not save.is_persisted_by_host:
                receipts.report(RankFailure.of(error))
                receipts.wait_for_outcome()
            self._delete_receipts(receipts)
        except CheckpointException as second_error:
            self._log.warning("could not tell the other ranks of a failed save", reason=str(second_error))

    def _delete_receipts(self, receipts: ReceiptExchange) -> None:
        try:
            receipts.delete_read()
        except CheckpointException as error:
            self._log.warning("could not delete receipts of a save", reason=str(error))


def _join(earlier: Sequence[threading.Thread], token: CancelToken) -> None:
    """Wait for the earlier saves. Polls, because this save may be cancelled while an earlier one is written."""
    for one in earlier:
        while one.is_alive():
            one.join(POLL_S)
            token.check()
