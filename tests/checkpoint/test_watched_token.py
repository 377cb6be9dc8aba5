from __future__ import annotations

import threading
from functools import partial

import anyio
import pytest
from anyio import lowlevel

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.thread_calls import StorageUnresponsive, run_in_thread
from forged.checkpoint.watched_token import WatchedToken

IDLE_S = 10.0


async def settle() -> None:
    for _ in range(3):
        await lowlevel.checkpoint()


async def test_token_extends_the_scope_while_its_operation_is_at_work() -> None:
    now = [0.0]
    token = WatchedToken(IDLE_S, lambda: now[0])
    with anyio.CancelScope() as scope:
        token.watch(scope)
        first = scope.deadline
        scope.deadline = first - IDLE_S / 2
        token.check()
        await settle()
        extended = scope.deadline
        assert extended >= first
        # It tells once a second only, and of each long pause.
        token.check()
        await settle()
        assert scope.deadline == extended
        token.cancel()
        with pytest.raises(CheckpointException):
            token.wait(500.0)
        await settle()
        assert scope.deadline >= extended + 500.0
        with pytest.raises(CheckpointException):
            token.check()


async def test_call_that_does_nothing_is_left_alone() -> None:
    answers, ended = threading.Event(), threading.Event()

    def hang(token: WatchedToken) -> None:
        answers.wait(60.0)
        try:
            token.check()
        finally:
            ended.set()

    token = WatchedToken(0.05)
    with pytest.raises(StorageUnresponsive, match="did not respond within"):
        await run_in_thread(partial(hang, token), token)
    answers.set()
