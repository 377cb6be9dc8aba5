"""Whose cancellation it is.

Law: a handler that awaits something cancelled raises `CancelledError` without anybody having cancelled it. That is a
failure like any other, and must not be mistaken for the end of the task that called it: a task group would end with it.
"""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether this very task was told to stop."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
