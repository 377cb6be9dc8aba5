"""The typed in-process bus: facts, requests and signals."""

from forged.kernel.bus.bus import DAEMON, Bus

__all__ = ["DAEMON", "Bus"]
