"""Fixtures of the plain client tests."""

from __future__ import annotations

from tests.client.conftest import threaded_daemon

__all__ = ["threaded_daemon"]
