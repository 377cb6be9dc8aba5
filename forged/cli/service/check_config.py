"""`forged check-config`: all errors of a configuration, before a daemon uses it.

The check does what a daemon does at its start: it loads certificates and registers plugins, in a daemon with a
temporary directory that is never started.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from forged.cli.service.serve import server_tls
from forged.clock import SystemClock
from forged.config import Config, SettingsReader
from forged.daemon import Daemon, Ports
from forged.errors import ConfigError, Problem
from forged.kernel.store.memory import MemoryStore
from forged.net.transport.sockets import SystemNetwork
from forged.plugins.alarm_guard import AlarmGuard
from forged.plugins.host.loader import find
from forged.plugins.host.plugin import Plugin


def check(path: Path) -> None:
    """Raise `ConfigError` with all errors."""
    settings = SettingsReader(path, {}, os.environ, os.getuid())
    config = settings.load()
    server_tls(config)
    found = [problem for plugin in _refused(config) for problem in _problems(plugin, config)]
    problems = [settings.locate(problem) for problem in found]
    if problems:
        reason = f"{path} configures plugins that cannot be loaded"
        raise ConfigError("plugins_refused", reason, "fix them, or set enabled = false", problems)


def _refused(config: Config) -> list[Plugin]:
    guard = AlarmGuard()
    try:
        with TemporaryDirectory() as directory:
            daemon = Daemon(replace(config, data_dir=directory), _ports(config, guard), MemoryStore("a check"))
            daemon.plugins.load(find(config.plugin_dir, os.geteuid()))
            return daemon.plugins.refused
    finally:
        guard.close()


def _ports(config: Config, guard: AlarmGuard) -> Ports:
    async def open_store() -> MemoryStore:
        return MemoryStore("a check")

    return Ports(SystemClock(), SystemNetwork(), os.getpid(), os.getuid(), open_store, guard=guard)


def _problems(plugin: Plugin, config: Config) -> Iterator[Problem]:
    if plugin.problems:
        yield from plugin.problems
    else:
        key = f"plugins.{plugin.name}" if plugin.name in config.plugins else "plugin_dir"
        yield Problem(key, plugin.origin, text=f"{key}: {plugin.origin} was refused: {plugin.reason}")
