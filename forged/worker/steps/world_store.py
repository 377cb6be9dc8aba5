"""The small values that the scripts of one world share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forged.errors import ForgedError, RequestRefused
from forged.net.protocol.messages import INTEGER_MAX
from forged.worker.collectives.world import World
from forged.worker.errors import CollectiveAborted, CollectiveMismatch, StepAborted
from forged.worker.transport.peer_messages import StoreAction
from forged.worker.worker_state.session_state import CurrentWorld


class WorldStore:
    """Values of the present world, held by its rank 0 and dropped with the world.

    Keys have up to 256 bytes, values up to 1 MiB, all of a world together 16 MiB. Calls may be made at any time, also
    while a collective waits. They raise `StepAborted` when the world is over.
    """

    def __init__(self, current_world: Callable[[], CurrentWorld]) -> None:
        self._current_world = current_world

    async def set(self, key: str, value: bytes) -> None:
        """Set a key, whose waiting `get`s return."""
        with self._world() as world:
            await world.store_calls.call(StoreAction.SET, key, bytes(value))

    async def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of a key, once it is set; raises `Unavailable` (`key_missing`) after the timeout."""
        with self._world() as world:
            answer = await world.store_calls.call(StoreAction.GET, key, waits=True, timeout_s=timeout_s)
            return answer.value or b""

    async def get_now(self, key: str) -> bytes | None:
        """The value of a key; None if it is not set."""
        with self._world() as world:
            return (await world.store_calls.call(StoreAction.GET, key)).value

    async def add(self, key: str, number: int) -> int:
        """Add to the number under a key, 0 if it is not set, and return the sum. `get` returns it in decimal digits."""
        if abs(number) > INTEGER_MAX:
            raise RequestRefused(
                "number_invalid", f"number must be at most {INTEGER_MAX}, got {number}", "add smaller numbers"
            )
        with self._world() as world:
            return (await world.store_calls.call(StoreAction.ADD, key, delta=number)).number_in

    async def delete(self, key: str) -> bool:
        """Delete a key; returns whether it was set."""
        with self._world() as world:
            return bool((await world.store_calls.call(StoreAction.DELETE, key)).number_in)

    @contextmanager
    def _world(self) -> Iterator[World]:
        current_world = self._current_world()
        world, over = current_world.world, current_world.over
        if world is None or over is not None:
            raise StepAborted("this worker is in no world at present" if over is None else over.reason)
        try:
            yield world
        except (CollectiveAborted, CollectiveMismatch) as error:
            cause: ForgedError = error
            raise StepAborted(cause.message) from error
