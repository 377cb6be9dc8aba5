"""The attacker: repeats attacks until they are cancelled, and counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

from tests.net.raw_client import RawClient

NOTE = "x" * 1000
PAUSE_S = 0.001
IGNORED = (OSError, EOFError, AssertionError, TimeoutError)
"""How the daemon's defence shows: refused or ended connections."""

Attack = Callable[["Tenant"], Awaitable[None]]


class Tenant:
    """The attacker: where the daemon is, its token and job, and what it has counted."""

    def __init__(self, endpoint: str, token: str, job: str) -> None:
        self.endpoint, self.token, self.job = endpoint, token, job
        self.counts: Counter[str] = Counter()

    async def repeat(self, attack: Attack) -> None:
        while True:
            with suppress(*IGNORED):
                await attack(self)
            self.counts[f"{attack.__name__} rounds"] += 1
            await asyncio.sleep(PAUSE_S)

    async def greeted(self, stack: AsyncExitStack) -> RawClient:
        client = await stack.enter_async_context(RawClient.greeted(self.endpoint, self.token))
        self.counts["connections"] += 1
        return client

    async def note(self, client: RawClient, number: int, text: str = NOTE) -> None:
        code = await client.request(number, "AddNote", job=self.job, text=text)
        self.counts["notes" if isinstance(code, dict) else f"refused: {code}"] += 1
