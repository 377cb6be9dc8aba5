"""The facts, as `forgectl events` reads them.

Law: whoever follows sees every fact once and in order, over any number of daemons at the same place, or the gap where
one is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from forged.cli.forgectl.connection import PROGRAM, Connection
from forged.cli.forgectl.parser import Options
from forged.cli.process import heed_reader, remark
from forged.errors import Unavailable
from forged.plain_client.connection import Event, Wire

T = TypeVar("T")

RECONNECT_PAUSE_S = 0.2
RECONNECT_PAUSE_MAX_S = 3.0
EARLIEST = -1


def past(options: Options) -> Iterator[Event]:
    """The facts until now."""
    since = EARLIEST if options.since is None else options.since
    with Connection(options) as wire:
        for _, event in wire.facts(since, options.type, options.job, until=wire.latest):
            if event is not None:
                yield event


def follow(options: Options) -> Iterator[Event]:
    """Facts for ever; when the daemon comes back, those behind the last fact that was shown."""
    position, history = options.since, ""

    def read(wire: Wire) -> Iterator[Event]:
        nonlocal position, history
        position = wire.latest if position is None else position
        history = history or wire.history
        for reached, event in wire.facts(position, options.type, options.job, history=history):
            position, history = reached, wire.history
            if event is not None:
                yield event

    return over_restarts(options, read)


def over_restarts(options: Options, read: Callable[[Wire], Iterator[T]]) -> Iterator[T]:
    """What is read of one connection after the other, for ever: when the daemon goes, wait for it."""
    pause_s = 0.0
    while True:
        try:
            with Connection(options) as wire:
                if pause_s > RECONNECT_PAUSE_S:
                    _remark("the daemon is back")
                wire.while_quiet = heed_reader
                pause_s = RECONNECT_PAUSE_S
                yield from read(wire)
        except Unavailable as error:
            if not pause_s:
                raise  # there was nobody from the start
            if pause_s == RECONNECT_PAUSE_S:
                _remark(f"{error.message}; waiting for the daemon")
            heed_reader()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_PAUSE_MAX_S)


def _remark(text: str) -> None:
    remark(f"{PROGRAM}: {text}")
