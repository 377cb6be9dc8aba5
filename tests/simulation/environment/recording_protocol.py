"""A protocol that records its calls."""

from __future__ import annotations

import asyncio


class RecordingProtocol(asyncio.Protocol):
    """Records its calls; bytes as they come."""

    def __init__(self, *, keep_open: bool = False) -> None:
        self.events: list[object] = []
        self.transport: asyncio.Transport
        self._keep_open = keep_open

    def note(self, event: object) -> None:
        """Record a call."""
        self.events.append(event)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.note("made")

    def data_received(self, data: bytes) -> None:
        self.note(data)

    def eof_received(self) -> bool:
        self.note("eof")
        return self._keep_open

    def connection_lost(self, exc: Exception | None) -> None:
        self.note(("lost", type(exc)))

    def pause_writing(self) -> None:
        self.note("pause")

    def resume_writing(self) -> None:
        self.note("resume")
