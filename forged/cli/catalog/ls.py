"""`forgectl ckpt ls` of a job: its checkpoints, newest first, and its facts about them as they come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from posixpath import dirname
from typing import Any

from forged.cli.catalog.names import listed, require_job
from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row, count_in
from forged.cli.forgectl.commands.events import over_restarts
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer, print_json
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_OK
from forged.plain_client.connection import Event, PlainConnection

COLUMNS = ("id", "step", "epoch", "type", "state", "size", "age_s", "metric", "path")
YIELDING = ("metric", "epoch", "path")
"""The columns that a narrow terminal cuts or omits first."""
SHOWN_MAX = 40
"""The longest list on a terminal without `--all`."""
FACTS = (
    "CheckpointStarted", "CheckpointCompleted", "CheckpointFailed", "CheckpointCorrupted", "CheckpointRepaired",
    "CheckpointCollected", "CheckpointCompacted", "CheckpointParentFound", "CheckpointOperationFailed",
    "CheckpointsAbandoned", "CheckpointReinstated", "CheckpointRestored", "CheckpointsAdopted",
    "EmergencyCheckpointSaved", "EmergencyCheckpointFailed",
)  # fmt: skip
METRIC_FIGURES = 4
METRIC = "loss"
"""The metric that is shown if the job's settings name none."""
NO_SETTINGS = frozenset({"job_unknown"})


def show_list(options: Options) -> int:
    is_cut = sys.stdout.isatty() and not (options.all or options.json)
    with DaemonConnection(options) as daemon:
        position, history = daemon.latest, daemon.history
        pages = {"pages_max": 1, "limit": SHOWN_MAX} if is_cut else {}
        page = listed(daemon, options.job, **pages)
        if not answers.rows_in(page, "checkpoints"):
            require_job(daemon, options.job)
        metric = _metric(daemon, options.job)
    answer(options, page, lambda: _show(options.job, page, metric, time.time()))
    if options.follow:
        sys.stdout.flush()
        _follow(options, position, history)
    return EXIT_OK


def _metric(daemon: PlainConnection, job: str) -> str:
    settings = answers.map_in(answers.one_unless(daemon, NO_SETTINGS, "ShowJob", job=job), "settings")
    return f"{settings.get('checkpoint_metric') or METRIC}"


# The list.


def _show(job: str, page: Row, metric: str, now: float) -> None:
    checkpoints = answers.rows_in(page, "checkpoints")
    folder = common_folder([path for one in checkpoints if isinstance(path := one.get("storage_path"), str) and path])
    rows = [row(one, folder, now) | {"metric": metric_text(one, metric)} for one in checkpoints]
    columns = [one for one in COLUMNS if one != "metric" or any(row["metric"] != tables.NONE for row in rows)]
    tables.table(rows, columns, _nothing(job), yielding=YIELDING, kept="id")
    print_rest(len(rows), page, "checkpoints")
    if rows:
        print(f"\n{_summary(page, folder)}")
    if cadence := page.get("cadence"):
        tables.print_wrapped(f"saves {tables.field('', cadence)}", tables.NOTE_INDENT)


def print_rest(shown: int, page: Row, what: str) -> None:
    """Print how many entries of a list are not shown."""
    if page.get("more"):
        print(f"and {max(1, count_in(page, 'count') - shown):,} more {what}: --all shows them")


def row(meta: Row, folder: str, now: float) -> Row:
    """A checkpoint as a row of a table; its path is shown within the folder."""
    created_at = meta.get("created_at")
    return {
        "id": meta.get("checkpoint_id"),
        "step": meta.get("step"),
        "epoch": meta.get("epoch"),
        "type": meta.get("checkpoint_type"),
        "state": state(meta),
        "size": size_text(meta.get("size_bytes")),
        "age_s": max(0.0, now - created_at) if isinstance(created_at, (int, float)) else None,
        "path": f"{meta.get('storage_path') or tables.NONE}".removeprefix(f"{folder}/" if folder else ""),
    }


def state(meta: Row) -> str:
    """The state with what else decides about the checkpoint."""
    held = len(answers.list_in(meta, "holders"))
    marks = [
        f"{meta.get('state') or tables.NONE}",
        *["pinned"] * bool(meta.get("pinned")),
        *["held"] * bool(held),
        *["abandoned"] * bool(meta.get("abandoned")),
    ]
    return ", ".join(marks)


def size_text(size_bytes: Any) -> str:
    """A size; a dash if it is not known yet."""
    return tables.size(size_bytes) if isinstance(size_bytes, int) and size_bytes > 0 else tables.NONE


def metric_text(meta: Row, metric: str) -> str:
    """The value of a metric with its name."""
    value = answers.map_in(meta, "metrics").get(metric)
    if not isinstance(value, (int, float)):
        return tables.NONE
    return f"{tables.field('', metric)} {value:.{METRIC_FIGURES}g}"


def common_folder(paths: Sequence[str]) -> str:
    """The deepest folder that all paths are in; empty if there is none."""
    folders = [dirname(path).split("/") for path in paths]
    if not folders:
        return ""
    shared: list[str] = []
    for names in zip(*folders, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    folder = "/".join(shared)
    # `s3://` is no folder.
    return "" if folder.endswith(("/", ":")) else folder


def _summary(page: Row, folder: str) -> str:
    said = f"{tables.counted(count_in(page, 'count'), 'checkpoint')}, {tables.size(count_in(page, 'size_bytes'))}"
    return f"{said}, in {tables.field('', folder)}" if folder else said


def _nothing(job: str) -> str:
    return (
        f"job {job} has no checkpoints: its workers report those that they save; "
        f"`forgectl ckpt adopt FOLDER --job {job}` adds existing ones"
    )


# Facts.


def _follow(options: Options, position: int, history: str) -> None:
    from forged.cli.forgectl.fact_sentences import in_words

    def read(daemon: PlainConnection) -> Iterator[Event]:
        nonlocal position, history
        for reached, event in daemon.facts(position, list(FACTS), [options.job], history=history):
            position, history = reached, daemon.history
            if event is not None:
                yield event

    for event in over_restarts(options, read):
        print_json(event) if options.json else tables.event(event, in_words)
        sys.stdout.flush()
