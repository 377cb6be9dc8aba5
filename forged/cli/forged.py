"""`forged`: the command that runs the daemon.

Law: this is where the outside world is put together. It knows signals, files and processes; the daemon does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forged.cli.process import EXIT_OK, complain, stop_writing
from forged.config import Config, load
from forged.errors import ConfigError, ForgedError
from forged.version import VERSION

if TYPE_CHECKING:
    import ssl

PROGRAM = "forged"
DATABASE = "forged.sqlite3"
FILES_BESIDES_CONNECTIONS = 128
"""Database, sockets, pipes, side connections."""
GC_THRESHOLDS = (50_000, 20, 50)
LOCK = "lock"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.act(options)
    except ForgedError as error:
        return complain(PROGRAM, error)
    except BaseExceptionGroup as group:
        # What goes wrong while the daemon runs comes out of its task groups, wrapped once for each.
        errors, bugs = group.split(ForgedError)
        if errors is None or bugs is not None:
            raise
        return max(complain(PROGRAM, error) for error in _leaves(errors))
    return code


def _leaves(group: BaseExceptionGroup[ForgedError]) -> Iterator[ForgedError]:
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _leaves(one)
        else:
            yield one


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="The control plane of elastic ML training.")
    parser.add_argument("--version", action="version", version=f"forged {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run the daemon in the foreground")
    run.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML; the flags below override it")
    run.add_argument("--data-dir", metavar="DIR", help="where the state is kept")
    run.add_argument("--socket", metavar="PATH", help="the Unix socket for forgectl (default: $FORGED_SOCKET)")
    run.add_argument("--listen", metavar="HOST:PORT", action="append", help="where workers connect; port 0 means any")
    run.add_argument("--http", metavar="HOST:PORT", help="where health and metrics are served; port 0 means any")
    run.set_defaults(act=_run)
    check = commands.add_parser("check-config", help="say whether a configuration is valid, and all that is not")
    check.add_argument("config", type=Path, metavar="FILE")
    check.set_defaults(act=_check_config)
    return parser


def _check_config(options: argparse.Namespace) -> int:
    _tls(load(options.config, {}, os.environ, os.getuid()))
    print(f"{options.config} is valid")
    return EXIT_OK


def _run(options: argparse.Namespace) -> int:
    given = {"data_dir": options.data_dir, "socket": options.socket, "listen": options.listen, "http": options.http}
    config = load(options.config, given, os.environ, os.getuid())
    config = _within_file_limit(config)
    with _exclusive(Path(config.data_dir)):
        asyncio.run(_serve(config))
    return EXIT_OK


def _within_file_limit(config: Config) -> Config:
    """Ask the system for as many open files as connections need; where it gives fewer, fewer connections are let in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.connections_max + FILES_BESIDES_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return config
    room = max(1, soft - FILES_BESIDES_CONNECTIONS)
    _say(f"forged lets in {room} connections, not {config.connections_max}: the system allows {soft} open files")
    return replace(config, connections_max=room)


@contextlib.contextmanager
def _exclusive(data_dir: Path) -> Iterator[None]:
    """Make the data directory, and keep every other daemon out of it."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = "it is not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(
            "data_dir_unusable", f"data_dir {data_dir}: {reason}", "give --data-dir a directory to write to"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            "data_dir_in_use", f"another daemon uses {data_dir}", "stop it, or give this one another --data-dir"
        ) from error
    try:
        yield
    finally:
        os.close(lock)


async def _serve(config: Config) -> None:
    from forged.clock import SystemClock
    from forged.daemon import Daemon, Ports
    from forged.net.sockets import SystemNetwork
    from forged.store.sqlite import SqliteStore

    async def open_store() -> SqliteStore:
        # Nobody watches the store from inside the daemon, so it need not remember changes.
        return await SqliteStore.open(Path(config.data_dir) / DATABASE, changes_max=0)

    network = SystemNetwork(tls_server=_tls(config), socket_mode=config.socket_mode)
    ports = Ports(SystemClock(), network, os.getpid(), os.getuid(), open_store)
    stop = _stop_signal()
    async with Daemon.running(config, ports) as daemon:
        _collect_seldom()
        addresses = ", ".join([f"unix://{config.socket}", *daemon.listening])
        _say(f"forged {VERSION} is ready on {addresses}; data in {config.data_dir}")
        await stop.wait()
        _say("forged is stopping; a second signal ends it at once")
    _say("forged has stopped")


def _collect_seldom() -> None:
    """What was loaded stays, and requests leave no cycles behind: looking for them often is time for nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _stop_signal() -> asyncio.Event:
    """Set by the first signal to stop; a second one ends the process, which loses nothing that was acknowledged."""
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


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:
        # Nobody reads it. The daemon is there for others.
        stop_writing()


def _tls(config: Config) -> ssl.SSLContext | None:
    if not config.tls_certificate:
        return None
    from forged.net.tls import server_context

    return server_context(config.tls_certificate, config.tls_key, config.tls_client_ca or None)


if __name__ == "__main__":
    sys.exit(main())
