"""`forged run`: the daemon as a process, with signals, files, sockets and systemd.

Invariants:
- Only this module knows signals, files, processes and systemd; the daemon itself does not.
- Readiness is reported once: to the notify socket if there is one, else by a line on standard output. Everything else
  goes to the log on standard error.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import gc
import os
import resource
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from forged.blocking.async_library import declare_asyncio
from forged.catalog.files.stored_files import StoredCheckpointFiles
from forged.cli.process import say
from forged.clock import SystemClock
from forged.config import Config, SettingsReader
from forged.config.service import SettingsPort
from forged.daemon import STOP_BEYOND_DRAIN_S, Daemon, Ports
from forged.errors import ConfigError
from forged.host.local_agent import LocalHostAgent
from forged.kernel.store.sqlite import SqliteStore
from forged.net.transport.interrupt_moderation import ModeratingSelector
from forged.net.transport.sockets import HANDSHAKES_MAX, SystemNetwork
from forged.net.transport.tls_server import WAITING_MAX
from forged.plugins.alarm_guard import AlarmGuard
from forged.plugins.host.loader import find
from forged.status.model import ReadStatus
from forged.systemd.activation import activated, inherited_sockets
from forged.systemd.notify import Notifier
from forged.systemd.report import read_status_line, report
from forged.systemd.watchdog import BusProbe, feed_watchdog, watchdog_interval_s
from forged.telemetry.log import configure
from forged.version import VERSION

if TYPE_CHECKING:
    import ssl

DATABASE = "forged.sqlite3"
FILES_BESIDES_CONNECTIONS = 384
"""For the database, sockets, pipes, side connections and HTTP clients."""
FILES_PER_TLS_ADDRESS = HANDSHAKES_MAX + WAITING_MAX
GC_THRESHOLDS = (50_000, 20, 50)
LOCK = "lock"
TERMINAL = 0
"""The descriptor of standard input."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class FileLimit:
    """The limit of open files of this process, and so of connections."""

    allowed: int = 0
    connections_wanted: int = 0

    def fit(self, config: Config) -> Config:
        """Raise the limit to what `connections_max` needs; if the system allows less, lower `connections_max`."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        tls_addresses = sum(address.startswith("tls://") for address in config.listen)
        besides = config.handshakes_max + FILES_BESIDES_CONNECTIONS + tls_addresses * FILES_PER_TLS_ADDRESS
        wanted = config.connections_max + besides
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self.allowed, self.connections_wanted = soft, config.connections_max
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return config
        return replace(config, connections_max=max(1, soft - besides))


class Process:
    """The process of one daemon."""

    def __init__(self, path: Path | None, flags: Mapping[str, Any]) -> None:
        self._notifier = Notifier.from_environment(os.environ)
        self._watchdog_s = watchdog_interval_s(os.environ, os.getpid())
        self._inherited = inherited_sockets(os.environ, os.getpid())
        self._files = FileLimit()
        self._settings = SettingsReader(path, flags, os.environ, os.getuid(), adapt=self._adapt)
        config = self._settings.load()
        self._tls = server_tls(config)
        network = SystemNetwork(
            tls_server=self._tls, socket_mode=config.socket_mode, tls_handshake_timeout_s=config.hello_timeout_s
        )
        self._config, self._network = activated(config, network, self._inherited)
        self._logs = configure(config.log_level, config.log_format)
        self._on_terminal = os.isatty(TERMINAL)

    def run(self) -> None:
        """Serve until a signal stops the daemon."""
        # Before the daemon runs there is nothing to reload.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # SIGABRT, as from a watchdog, prints the stacks.
        with contextlib.suppress(ValueError, OSError):
            faulthandler.enable()
        try:
            with exclusive(Path(self._config.data_dir)), asyncio.Runner(loop_factory=event_loop) as runner:
                declare_asyncio()
                runner.run(self._serve())
        finally:
            self._logs.close()

    async def _serve(self) -> None:
        stop, reload = _stop_signal(), _reload_signal()
        async with anyio.create_task_group() as tasks:
            async with Daemon.running(self._config, self._ports()) as daemon:
                _collect_seldom()
                tasks.start_soon(self._reload_on_signal, reload, stop, daemon)
                self._look_after(daemon, tasks)
                await self._report_ready(daemon)
                await stop.wait()
                self._report_stopping(daemon)
            # The watchdog is fed until here, so that a long shutdown does not count as a hang.
            tasks.cancel_scope.cancel()
        self._logs.log.info("the daemon has stopped")

    def _ports(self) -> Ports:
        config = self._config

        async def open_store() -> SqliteStore:
            # The daemon does not watch its own store, so the store need not remember changes.
            return await SqliteStore.open(Path(config.data_dir) / DATABASE, changes_max=0)

        source = str(self._settings.path) if self._settings.path else None
        return Ports(
            SystemClock(),
            self._network,
            os.getpid(),
            os.getuid(),
            open_store,
            log=self._logs.log,
            log_lines_lost=lambda: self._logs.lost,
            settings=SettingsPort(self._reload, self._applied, self._settings.defaults, source),
            plugins=find(config.plugin_dir, os.geteuid()),
            guard=AlarmGuard(),
            compute=to_thread.run_sync,
            checkpoint_files=StoredCheckpointFiles(),
            host=LocalHostAgent(config.slot_dir, config.data_dir),
        )

    # Settings.

    def _adapt(self, config: Config) -> Config:
        """Adapt settings to the process: its limit of open files and the sockets passed to it."""
        return activated(self._files.fit(config), SystemNetwork(), self._inherited)[0]

    async def _reload(self) -> Config:
        """Read the settings and the certificates again."""
        wanted = await anyio.to_thread.run_sync(self._settings.reload)
        # A changed file name waits for a restart, like its setting, and the old file may be gone.
        if self._tls is not None and _tls_files(wanted) == _tls_files(self._config):
            _renew(self._tls, *_tls_files(wanted))
        self._warn_of_fewer_connections(wanted)
        return wanted

    def _applied(self, config: Config) -> None:
        self._logs.set_level(config.log_level)

    async def _reload_on_signal(self, requested: asyncio.Event, stop: asyncio.Event, daemon: Daemon) -> None:
        while True:
            await requested.wait()
            requested.clear()
            if stop.is_set():
                return
            if self._on_terminal and not os.isatty(TERMINAL):
                # The SIGHUP came from closing the terminal, not from a reload.
                stop.set()
                return
            self._notifier.reloading(time.monotonic_ns() // 1000)
            outcome = await daemon.settings.reload("SIGHUP")
            if not daemon.ledger.writable_now:
                self._logs.log.warning(
                    "settings were reloaded; the reload cannot be recorded because the store fails",
                    outcome=repr(outcome),
                )
            self._notifier.ready(await self._status(daemon))

    # The service manager.

    def _look_after(self, daemon: Daemon, tasks: TaskGroup) -> None:
        if not self._notifier.active:
            return
        tasks.start_soon(report, self._notifier, partial(daemon.bus.ask, ReadStatus()))
        if self._watchdog_s is not None:
            probe = BusProbe(daemon.bus, self._watchdog_s)
            tasks.start_soon(feed_watchdog, self._notifier, self._watchdog_s, probe, self._logs.log)

    async def _report_ready(self, daemon: Daemon) -> None:
        addresses = [f"unix://{self._config.socket}", *daemon.listening]
        self._warn_of_fewer_connections(self._config)
        if daemon.listening:
            self._report_roles_without_token(daemon.config)
        if self._notifier.active:
            self._notifier.ready(await self._status(daemon))
            self._logs.log.info("the daemon is ready", addresses=addresses, data_dir=self._config.data_dir)
        else:
            say(f"forged {VERSION} is ready on {', '.join(addresses)}; data in {self._config.data_dir}")

    def _warn_of_fewer_connections(self, config: Config) -> None:
        if config.connections_max < self._files.connections_wanted:
            self._logs.log.warning(
                "the limit of open files lowers connections_max",
                connections=config.connections_max,
                wanted=self._files.connections_wanted,
                open_files=self._files.allowed,
            )

    def _report_roles_without_token(self, config: Config) -> None:
        own, anonymous = config.own_user_loopback_role, config.anonymous_loopback_role
        if own != "none":
            self._logs.log.info("this user needs no token over TCP on this host", user=os.getuid(), role=own)
        if anonymous != "none":
            self._logs.log.warning("no user of this host needs a token over TCP", role=anonymous)

    def _report_stopping(self, daemon: Daemon) -> None:
        self._notifier.stopping("stopping", within_s=daemon.config.drain_timeout_s + 2 * STOP_BEYOND_DRAIN_S)
        self._logs.log.info("the daemon is stopping; a second signal kills it")

    async def _status(self, daemon: Daemon) -> str:
        return await read_status_line(partial(daemon.bus.ask, ReadStatus()))


def event_loop() -> asyncio.AbstractEventLoop:
    """The daemon's event loop, which handles many small messages per turn."""
    return asyncio.SelectorEventLoop(ModeratingSelector(time.monotonic))


def server_tls(config: Config) -> ssl.SSLContext | None:
    """The TLS context for `tls://`; None without a configured certificate."""
    if not config.tls_certificate:
        return None
    from forged.net.transport.tls import server_context

    return server_context(*_tls_files(config))


def _renew(context: ssl.SSLContext, certificate: str, key: str, client_ca: str | None) -> None:
    from forged.net.transport.tls import renew

    renew(context, certificate, key, client_ca)


def _tls_files(config: Config) -> tuple[str, str, str | None]:
    return config.tls_certificate, config.tls_key, config.tls_client_ca or None


@contextlib.contextmanager
def exclusive(data_dir: Path) -> Iterator[None]:
    """Create the data directory and lock it against other daemons."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = "it is not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(
            "data_dir_unusable", f"data_dir {data_dir}: {reason}", "set --data-dir to a writable directory"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            "data_dir_in_use", f"another daemon uses {data_dir}", "stop that daemon, or set another --data-dir"
        ) from error
    try:
        yield
    finally:
        os.close(lock)


def _collect_seldom() -> None:
    """Collect garbage less often: loaded modules stay, and requests leave no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _stop_signal() -> asyncio.Event:
    """Set by the first stop signal; the second kills the process, which loses nothing acknowledged."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_once() -> None:
        stop.set()
        for name in STOP_SIGNALS:
            loop.remove_signal_handler(name)
            signal.signal(name, signal.SIG_DFL)

    for name in STOP_SIGNALS:
        loop.add_signal_handler(name, stop_once)
    return stop


def _reload_signal() -> asyncio.Event:
    """Set by each SIGHUP."""
    requested = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, requested.set)
    return requested
