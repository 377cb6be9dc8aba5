"""Asking a dataset's origin, which may never answer.

Law: each call has a thread of its own, and nobody waits for that thread: not who called, when the origin gives nothing
for as long as there is patience, or when the shard is no longer wanted; not another call; and not the process at its
end. Of the calls that were left and have not ended there are only so many, altogether and for one shard. One more
waits for those that may still end, and is refused when they have been silent for as long as there is patience, or were
left that long ago. The origin runs in a context of its own, which has nothing of the event loop that called.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from contextvars import Context

import anyio
from anyio import CapacityLimiter, to_thread

from forged.data.store.origin import Bringing
from forged.data.store.port import Stamp, StoreFailed
from forged.errors import Unavailable, describe
from forged.phrases import counted

LEFT_MAX = 64
LEFT_PER_SHARD_MAX = 3
"""What one call waits for in vain, a later one may be given: a connection may be dead, and the next one not."""
LOOK_AGAIN_S = 0.01
"""How long to wait at least before looking at the clock once more."""
HOW_TO_HELP = "see what it waits for; a time-out of its own would have told sooner"


class OriginSilent(Unavailable):
    """The origin gave nothing for as long as there was patience."""


class OriginStuck(Unavailable):
    """The origin is not asked, because it has not let go of those who asked it before."""


class StoreStuck(OriginStuck):
    """It is not asked, because some of those who asked it before hang in what keeps the shards here."""


def _silence(shard_id: int, patience_s: float) -> str:
    return f"the origin gave nothing of shard {shard_id} for {patience_s:g} s"


def _not_back(calls: int) -> str:
    return f"{counted(calls, 'call')} {'have' if calls > 1 else 'has'} not come back"


class _Call:
    """One question, and the answer when there is one."""

    def __init__(self, bringing: Bringing) -> None:
        self.bringing = bringing
        self.over = anyio.Event()
        self._answer: Stamp | Exception | None = None

    def make(self) -> Stamp | Exception:
        """Ask, whatever comes of it."""
        try:
            return self.bringing.run()
        except Exception as error:  # noqa: BLE001 - it is raised where the answer is waited for
            return error
        except BaseException as error:  # noqa: BLE001 - there it would cancel who waits, or end the event loop
            why = f"shard {self.bringing.shard_id} cannot be kept: {describe(error)}"
            return StoreFailed("shard_store_failed", why, "see what keeps the shards")

    def end(self, answer: Stamp | Exception) -> None:
        """There is an answer."""
        self._answer = answer
        self.over.set()

    def answer(self) -> Stamp:
        """What came of it."""
        if isinstance(self._answer, Exception):
            raise self._answer
        assert self._answer is not None
        return self._answer


class OriginCalls:
    """All calls of one worker."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._left: dict[_Call, None] = {}
        """Those that nobody waits for any more, and that have not ended."""
        self._ended = anyio.Event()
        """One of them has."""
        self._queue: dict[Bringing, list[_Call]] = {}
        """Those that are not begun yet, and for which of the calls that were left they wait."""

    async def ask(self, bringing: Bringing) -> Stamp:
        """Have a shard brought; raises `OriginSilent` or `OriginStuck` for what hangs."""
        await self._have_room(bringing)
        call = _Call(bringing)
        self._begin(call)
        try:
            await self._hear(call)
        except BaseException:
            await self._leave(call)
            raise
        return call.answer()

    def origin_silent_s(self, bringing: Bringing) -> float | None:
        """For how long the origin has been silent, if nothing else is waited for to have the shard brought."""
        if bringing.is_given_up:
            return None
        awaited = [call.bringing for call in self._queue.get(bringing, ())] or [bringing]
        silences = [silent_s for one in awaited if (silent_s := one.origin_silent_s()) is not None]
        return min(silences) if len(silences) == len(awaited) else None

    def _begin(self, call: _Call) -> None:
        loop = asyncio.get_running_loop()

        def run() -> None:
            # A context that was copied would say that the thread runs an event loop, and an origin could run none.
            answer = Context().run(call.make)
            # Nobody is there to hear of it when the loop has ended meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end, call, answer)

        threading.Thread(target=run, name=f"origin of shard {call.bringing.shard_id}", daemon=True).start()

    def _end(self, call: _Call, answer: Stamp | Exception) -> None:
        call.end(answer)
        if call in self._left:
            del self._left[call]
            ended, self._ended = self._ended, anyio.Event()
            ended.set()

    async def _hear(self, call: _Call) -> None:
        while not call.over.is_set():
            left_s = self._patience_s - call.bringing.silent_s()
            if left_s <= 0:
                silence = _silence(call.bringing.shard_id, self._patience_s)
                raise OriginSilent("origin_silent", silence, HOW_TO_HELP)
            with anyio.move_on_after(max(left_s, LOOK_AGAIN_S)):
                await call.over.wait()

    async def _leave(self, call: _Call) -> None:
        if call.over.is_set():
            return
        self._left[call] = None
        # What a store cannot free here it says again when the shard is asked for once more.
        with anyio.CancelScope(shield=True), suppress(Exception):
            await to_thread.run_sync(call.bringing.give_up, limiter=CapacityLimiter(1))

    async def _have_room(self, bringing: Bringing) -> None:
        """Wait until another call may be made."""
        try:
            while in_the_way := self._in_the_way(bringing.shard_id):
                self._queue[bringing] = in_the_way
                left_s = self._patience_s - min(call.bringing.silent_s() for call in in_the_way)
                if left_s <= 0:
                    raise self._stuck(bringing.shard_id, in_the_way)
                with anyio.move_on_after(max(left_s, LOOK_AGAIN_S)):
                    await self._ended.wait()
        finally:
            self._queue.pop(bringing, None)

    def _stuck(self, shard_id: int, in_the_way: list[_Call]) -> OriginStuck:
        if ours := sum(call.bringing.origin_silent_s() is None for call in in_the_way):
            why = f"{_not_back(ours)} from what keeps the shards here, so the origin is not asked for shard {shard_id}"
            return StoreStuck("store_stuck", why, "see the disk")
        why = f"{_silence(shard_id, self._patience_s)}, and {_not_back(len(in_the_way))} from it"
        return OriginStuck("origin_stuck", why, HOW_TO_HELP)

    def _in_the_way(self, shard_id: int) -> list[_Call]:
        if len(self._left) >= LEFT_MAX:
            return list(self._left)
        of_the_same = [call for call in self._left if call.bringing.shard_id == shard_id]
        return of_the_same if len(of_the_same) >= LEFT_PER_SHARD_MAX else []


class CallsWithoutThreads(OriginCalls):
    """For simulations: the origin is asked within the event loop, and a call ends when it is left."""

    async def ask(self, bringing: Bringing) -> Stamp:
        """Have a shard brought."""
        async with anyio.create_task_group() as tasks:
            call = _Call(bringing)
            tasks.start_soon(self._make, call)
            try:
                await self._hear(call)
            except OriginSilent as error:
                call.end(error)
            finally:
                bringing.give_up()
                tasks.cancel_scope.cancel()
        return call.answer()

    @staticmethod
    async def _make(call: _Call) -> None:
        try:
            call.end(await call.bringing.run_here())
        except Exception as error:  # noqa: BLE001 - it is raised where the answer is waited for
            call.end(error)
