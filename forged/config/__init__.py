"""The daemon's settings: what they are, where they come from, and what may change while it runs."""

from forged.config.model import DEFAULT_LISTEN, Config
from forged.config.source import Settings, Source, load

__all__ = ["DEFAULT_LISTEN", "Config", "Settings", "Source", "load"]
