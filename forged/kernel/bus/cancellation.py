"""Distinguish a cancelled task from a handler that raises `CancelledError`.

A handler that awaits a cancelled future raises `CancelledError` although its task was not cancelled. That is a failure
of the handler; treated as a cancellation it would end the whole task group.
"""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether the current task itself was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
