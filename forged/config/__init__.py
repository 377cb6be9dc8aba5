"""The daemon's settings."""

from forged.config.model import DEFAULT_LISTEN, Config
from forged.config.source import Settings, Source, load

__all__ = ["DEFAULT_LISTEN", "Config", "Settings", "Source", "load"]
