"""Fixtures of the command tests."""

from __future__ import annotations

from tests.client.conftest import threaded_daemon

__all__ = ["threaded_daemon"]
