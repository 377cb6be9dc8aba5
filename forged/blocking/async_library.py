"""Tells sniffio, where it is installed, that a thread runs asyncio."""

from __future__ import annotations

import contextlib
from importlib import import_module


def declare_asyncio() -> None:
    """Have asyncio found in callbacks of this thread's event loop.

    anyio asks sniffio where it is installed, with httpx for example, and that finds asyncio in tasks only.
    """
    with contextlib.suppress(ModuleNotFoundError):
        import_module("sniffio").thread_local.name = "asyncio"
