"""The daemon's settings."""

from forged.config.model import DEFAULT_LISTEN, Config
from forged.config.source import SettingsFile, SettingsReader, load

__all__ = ["DEFAULT_LISTEN", "Config", "SettingsFile", "SettingsReader", "load"]
