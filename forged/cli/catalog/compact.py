"""`forgectl ckpt compact`: makes a full checkpoint of an incremental one, and follows until that is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from forged.cli.catalog import names
from forged.cli.catalog.show import progress_text
from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.commands.events import over_restarts
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer, print_json
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_OK, stop_without_reader
from forged.errors import ForgedError
from forged.plain_client.connection import PlainConnection

POLL_INTERVAL_S = 0.3
INCREMENTAL = "incremental"
FAILED = "CheckpointOperationFailed"


def compact(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        view = names.find(daemon, options.job, options.checkpoint)
        meta = answers.map_in(view, "meta")
        reply = answers.one(daemon, "CompactCheckpoint", job=options.job, checkpoint_id=meta.get("checkpoint_id"))
        started_at = daemon.latest
    if options.follow:
        return _follow(options, meta, started_at)
    started = f"compacting {names.described(meta)}; `forgectl ckpt show` tells how far it is"
    answer(options, reply, lambda: print(started))
    return EXIT_OK


def _follow(options: Options, meta: Row, started_at: int) -> int:
    """Show the progress until the checkpoint is full, or the daemon has given up."""
    name, printed = names.described(meta), ""
    for view in over_restarts(options, lambda daemon: _poll(daemon, options.job, f"{meta.get('checkpoint_id')}")):
        operation = answers.map_in(view, "operation")
        if not operation:
            break
        line = f"{name}: {progress_text(operation)}"
        if line != printed:
            print_json(view) if options.json else print(line)
            sys.stdout.flush()
        printed = line
    meta = answers.map_in(view, "meta")
    if meta.get("checkpoint_type") != INCREMENTAL:
        full = f"{name}: it is a full checkpoint now, {tables.size(answers.count_in(meta, 'size_bytes'))}"
        answer(options, view, lambda: print(full))
        return EXIT_OK
    raise ForgedError("checkpoint_not_compacted", f"{name} is not compacted: {_why(options, meta, started_at)}")


def _poll(daemon: PlainConnection, job: str, checkpoint_id: str) -> Iterator[Row]:
    while True:
        yield names.show(daemon, job, checkpoint_id)
        stop_without_reader()
        time.sleep(POLL_INTERVAL_S)


def _why(options: Options, meta: Row, started_at: int) -> str:
    """Why the daemon has given up."""
    reason = "the daemon no longer works on it"
    with DaemonConnection(options) as daemon:
        for _, event in daemon.facts(started_at, [FAILED], [options.job], until=daemon.latest):
            fact = answers.map_in(event or {}, "fact")
            if fact.get("checkpoint_id") == meta.get("checkpoint_id"):
                reason = tables.field("", fact.get("reason"))
    return reason
