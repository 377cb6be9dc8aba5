"""The slots of one worker: asks the daemon of its host for them, and has it save what is staged there.

It is called from threads, and its connections are its own: the last save of a worker is asked for after the worker has
left, and while the script's event loop may be closed.

Invariants:
- A daemon that is away, or refuses, delays and fails no save: the worker stages into memory of its own, and says so
  once per reason.
- A daemon that was asked to save, and does not answer, may do so later: the ranks write files of other names, and the
  manifest that is published first counts.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from forged.client.client import ForgedClient
from forged.errors import ForgedError, RequestRefused, Unavailable
from forged.host.messages import CloseSlots, FindStagedSlots, OpenedSlots, OpenSlots, SaveSlots, ShareSlots
from forged.log import Log
from forged.net.transport.port import Network

if TYPE_CHECKING:
    # A worker that saves no checkpoints does not import them.
    from forged.checkpoint.errors import CheckpointException
    from forged.checkpoint.ports import CancelToken, SlotLease, SlotMemory, StagedStorage

CONNECT_TIMEOUT_S = 2.0
OPEN_TIMEOUT_S = 60.0
"""The memory of slots is reserved before they are given out, at a second per GiB or so."""
AWAY_S = 3.0
"""After so long without an answer the daemon counts as away, and the ranks write their save."""
SAVE_TIMEOUT_S = 10.0
"""For one request; it is repeated."""
RETRY_S = 60.0
"""After the daemon has refused slots, how long it is not asked again."""
PAUSE_S = 0.2


class SlotUser(NamedTuple):
    """The process that has slots."""

    job: str
    worker_id: str
    incarnation: bytes
    endpoints: tuple[str, ...]


class WorkerSlots:
    """The slots of one worker; a `forged.checkpoint.ports.HostSlots`."""

    def __init__(
        self,
        job: str,
        user: Callable[[], SlotUser | None],
        endpoints: Callable[[], tuple[str, ...] | None],
        token: str | None,
        network: Network | None,
        log: Log,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`user` returns the registered worker; None while there is none, or no connection to a daemon. `endpoints`
        returns the daemon's; None while no session is open.
        """
        self._job = job
        self._user = user
        self._endpoints = endpoints
        self._token = token
        self._network = network
        self._log = log
        self._monotonic = monotonic
        self._last: SlotUser | None = None
        self._asked_again_at = 0.0
        self._said: set[str] = set()

    @property
    def owner(self) -> bytes:
        user = self._user() or self._last
        return b"" if user is None else user.incarnation

    def open(self, size: int, storage: str, token: CancelToken) -> SlotLease | None:
        user = self._user()
        if user is None or not storage.startswith("/") or self._monotonic() < self._asked_again_at:
            return None
        try:
            opened, slots = asyncio.run(self._open(user, size, storage, token))
        except ForgedError as error:
            self._asked_again_at = self._monotonic() + RETRY_S
            if error.code not in self._said:
                self._said.add(error.code)
                self._log.info("states are staged into memory of this worker", reason=error.message, fix=error.fix)
            return None
        from forged.checkpoint.ports import SlotLease

        self._last = user
        return SlotLease(user.incarnation, slots, opened.persists)

    async def _open(
        self, user: SlotUser, size: int, storage: str, token: CancelToken
    ) -> tuple[OpenedSlots, list[SlotMemory]]:
        remaining_s = token.remaining_s()
        timeout_s = OPEN_TIMEOUT_S if remaining_s is None else min(OPEN_TIMEOUT_S, remaining_s)
        async with self._client(user.endpoints, CONNECT_TIMEOUT_S) as client:
            opened = await client.request(
                OpenSlots(user.job, user.worker_id, user.incarnation, size, storage), timeout_s=timeout_s
            )
            try:
                return opened, await asyncio.to_thread(_mapped, opened)
            except PermissionError:
                # Slots of another user's daemon come as descriptors.
                ticket = await client.request(ShareSlots(user.job, user.worker_id, user.incarnation, storage))
                return opened, _mapped_descriptors(await client.fetch_descriptors(ticket), opened.size_bytes)
            except (OSError, RequestRefused) as error:
                with suppress(ForgedError):
                    await client.request(CloseSlots(user.job, user.worker_id, user.incarnation))
                raise Unavailable(
                    "slots_unreachable",
                    f"cannot open {opened.paths[0]}: {error}",
                    "run the worker on the daemon's host",
                ) from error

    @contextmanager
    def staged(self, storage: str, token: CancelToken) -> Iterator[StagedStorage | None]:
        from forged.checkpoint.errors import CheckpointException
        from forged.checkpoint.storage.slot_files import SlotFile, SlotSet
        from forged.checkpoint.storage.slot_storage import SlotStorage

        with ExitStack() as stack:
            found = None
            try:
                files = []
                for path in asyncio.run(self._find(storage)) if storage.startswith("/") else ():
                    files.append(SlotFile(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)))
                    stack.callback(files[-1].close)
                if files and all(file.lock() for file in files):
                    found = SlotStorage(SlotSet(files), f"the slots of job {self._job}")
            except (ForgedError, OSError, CheckpointException) as error:
                self._log.info("what is in slots cannot be restored", reason=str(error))
            yield found

    async def _find(self, storage: str) -> list[str]:
        endpoints = self._endpoints()
        if endpoints is None:
            return []
        async with self._client(endpoints, CONNECT_TIMEOUT_S) as client:
            staged = await client.request(FindStagedSlots(self._job, storage), timeout_s=SAVE_TIMEOUT_S)
        return staged.paths

    @property
    def is_present(self) -> bool:
        return self._user() is not None

    def persist(self, save_id: str, token: CancelToken) -> int:
        from forged.checkpoint.errors import CheckpointException

        try:
            return asyncio.run(self._persist(save_id, token))
        except CheckpointException:
            raise
        except ForgedError as error:
            raise _refusal(error) from error

    async def _persist(self, save_id: str, token: CancelToken) -> int:
        """Ask until the checkpoint is saved; a daemon that is away is waited for, but not long."""
        from forged.checkpoint.ports import HostAway

        user = self._opened_by
        request = SaveSlots(user.job, user.worker_id, user.incarnation, save_id)
        answered_at = self._monotonic()
        while True:
            try:
                async with self._client(user.endpoints, AWAY_S) as client:
                    while True:
                        save = await client.request(request, timeout_s=SAVE_TIMEOUT_S)
                        if save.is_saved:
                            return save.size_bytes
                        answered_at = self._monotonic()
                        _require_time(token)
            except ForgedError as error:
                if not error.retryable:
                    raise
                if self._monotonic() - answered_at >= AWAY_S:
                    raise HostAway(error.message, code="slots_host_away", fix=error.fix, retryable=True) from error
            _require_time(token)
            await asyncio.sleep(PAUSE_S)

    def refusal_of(self, save_id: str) -> CheckpointException | None:
        try:
            asyncio.run(self._ask_outcome(save_id))
        except ForgedError as error:
            return None if error.retryable else _refusal(error)
        return None

    async def _ask_outcome(self, save_id: str) -> None:
        user = self._opened_by
        request = SaveSlots(user.job, user.worker_id, user.incarnation, save_id, begins=False)
        async with self._client(user.endpoints, CONNECT_TIMEOUT_S) as client:
            await client.request(request, timeout_s=SAVE_TIMEOUT_S)

    @property
    def _opened_by(self) -> SlotUser:
        assert self._last is not None, "slots are opened before they are saved"
        return self._last

    def _client(self, endpoints: tuple[str, ...], connect_timeout_s: float) -> ForgedClient:
        return ForgedClient(*endpoints, token=self._token, network=self._network, connect_timeout_s=connect_timeout_s)


def _refusal(error: ForgedError) -> CheckpointException:
    from forged.checkpoint.errors import CheckpointException, ExceptionType

    return CheckpointException(error.message, type=ExceptionType.SAVE_FAILED, code=error.code, fix=error.fix)


def _require_time(token: CancelToken) -> None:
    """Raise `OutcomeUnknown` when the save was cancelled or takes too long: the daemon may go on with it."""
    from forged.checkpoint.errors import CheckpointException
    from forged.checkpoint.rank_group import OutcomeUnknown

    try:
        token.check()
    except CheckpointException as error:
        raise OutcomeUnknown(
            f"the daemon has not confirmed the save: {error.message}",
            type=error.type,
            code="checkpoint_undecided",
            fix="`forgectl ckpt ls` shows whether the checkpoint exists; the daemon may still save it",
        ) from error


def _mapped(opened: OpenedSlots) -> list[SlotMemory]:
    """The slots as memory, by their paths."""
    fds: list[int] = []
    try:
        for path in opened.paths:
            fds += [os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return _mapped_descriptors(fds, opened.size_bytes)


def _mapped_descriptors(fds: Sequence[int], size: int) -> list[SlotMemory]:
    """The slots as memory, all pages present; closes the descriptors if that fails."""
    from forged.checkpoint.ports import SlotMemory

    try:
        for fd in fds:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size < size:
                raise RequestRefused("slot_invalid", f"a slot must be a file of {size} bytes", "restart the daemon")
        return [SlotMemory(mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), fd) for fd in fds]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
