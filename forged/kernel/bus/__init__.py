"""The typed in-process bus that delivers facts, requests and signals to handlers."""

from forged.kernel.bus.bus import DAEMON, Bus

__all__ = ["DAEMON", "Bus"]
