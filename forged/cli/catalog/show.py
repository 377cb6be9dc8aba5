"""`forgectl ckpt show`, `estimate`, `pin`, `unpin` and `reinstate`: one checkpoint of the catalogue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from forged.cli.catalog import names
from forged.cli.catalog.ls import metric_text, size_text, state
from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_FAILED, EXIT_OK

CHAIN_SHOWN_MAX = 5
SHOWN_APART = frozenset(
    {"meta", "chain", "children", "is_restorable", "is_managed", "is_kept", "retention", "estimate", "operation"}
)
"""The fields of a `CheckpointView` that are shown under other names."""


def show_one(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        view = names.find(daemon, options.job, options.where)
    answer(options, view, lambda: tables.pairs(_fields(view, time.time())))
    return EXIT_OK


def show_estimate(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        view = names.find(daemon, options.job, options.checkpoint)
    meta, estimate = answers.map_in(view, "meta"), answers.map_in(view, "estimate")
    reply = {"checkpoint_id": meta.get("checkpoint_id"), "step": meta.get("step"), "estimate": estimate or None}
    takes = "a restore takes " if estimate and view.get("is_restorable") is not False else ""
    answer(options, reply, lambda: print(f"{names.described(meta)}: {takes}{_restore(view)}"))
    return EXIT_OK if estimate else EXIT_FAILED


def pin(options: Options) -> int:
    return _change(options, "PinCheckpoint", "pinned {name}: no collection deletes it until `forgectl ckpt unpin`")


def unpin(options: Options) -> int:
    return _change(options, "UnpinCheckpoint", "unpinned {name}; `forgectl ckpt gc --dry-run` shows whether it is kept")


def reinstate(options: Options) -> int:
    reason = {} if options.reason is None else {"reason": options.reason}
    done = "reinstated {name}; `forgectl ckpt restore-point` shows what the job would be restored from"
    return _change(options, "ReinstateCheckpoint", done, **reason)


def _change(options: Options, method: str, done: str, **fields: str) -> int:
    with DaemonConnection(options) as daemon:
        found = answers.map_in(names.find(daemon, options.job, options.checkpoint), "meta")
        meta = answers.one(daemon, method, job=options.job, checkpoint_id=found.get("checkpoint_id"), **fields)
    answer(options, meta, lambda: print(done.format(name=names.described(found))))
    return EXIT_OK


def estimate_text(estimate: Row) -> str:
    """How long a restore takes, with its interval and the origin of the figures; empty if there is no estimate."""
    expected, low, high = (_seconds(estimate.get(key)) for key in ("expected_s", "low_s", "high_s"))
    if not estimate:
        return ""
    source = f"; {tables.field('', estimate['source'])}" if estimate.get("source") else ""
    return f"{expected} ({low} to {high}{source})"


def chain_text(chain: Sequence[Any]) -> str:
    """Checkpoints in the order in which they build on each other; the middle of a long chain is only counted."""
    names = [tables.field("", one) for one in chain]
    if len(names) > CHAIN_SHOWN_MAX:
        names[1:-2] = [f"{len(names) - 3:,} more"]
    return " → ".join(names)


def _seconds(value: Any) -> str:
    return tables.duration(value) if isinstance(value, (int, float)) else tables.NONE


def _restore(view: Row) -> str:
    """Whether and how fast a checkpoint can be restored."""
    if view.get("is_restorable") is False:
        return "cannot be restored"
    return estimate_text(answers.map_in(view, "estimate")) or "no estimate"


def _fields(view: Row, now: float) -> dict[str, Any]:
    """A checkpoint as lines, the most important first."""
    meta = answers.map_in(view, "meta")
    shown: dict[str, Any] = {
        "id": meta.get("checkpoint_id"),
        "job": meta.get("training_run_id"),
        "step": meta.get("step"),
        "epoch": meta.get("epoch"),
        "type": meta.get("checkpoint_type"),
        "state": state(meta),
        "path": meta.get("storage_path"),
        "size": size_text(meta.get("size_bytes")),
        "created": _moment(meta.get("created_at"), now),
        "verified": _moment(meta.get("verified_at"), now) if meta.get("verified_at") else "never",
        "metrics": ", ".join(metric_text(meta, metric) for metric in answers.map_in(meta, "metrics")),
        "held by": answers.list_in(meta, "holders"),
        "builds on": chain_text(answers.list_in(view, "chain")[:-1]),
        "needed by": tables.names(answers.list_in(view, "children")),
        "restore": _restore(view),
        "retention": _retention(view),
        "files": _files(view),
    }
    operation = answers.map_in(view, "operation")
    if operation:
        shown["in progress"] = progress_text(operation)
    more = {key: value for key, value in view.items() if key not in SHOWN_APART}
    return {key: value for key, value in shown.items() if value not in (None, "", [], tables.NONE)} | more


def progress_text(operation: Row) -> str:
    """How far an operation of the daemon is."""
    done, total = (answers.count_in(operation, key) for key in ("done_bytes", "total_bytes"))
    share = f" ({min(1.0, done / total):.0%})" if total else ""
    return f"{tables.field('', operation.get('operation'))}: {tables.size(done)} of {tables.size(total)}{share}"


def _moment(at: Any, now: float) -> str | None:
    if not isinstance(at, (int, float)):
        return None
    age_s = now - at
    return f"{tables.moment(at)} ({tables.duration(age_s)} ago)" if age_s >= 1 else tables.moment(at)


def _retention(view: Row) -> str:
    said = tables.field("", view.get("retention"))
    if "is_kept" not in view:
        return said
    return f"kept: {said}" if view["is_kept"] else f"goes at the next collection: {said}"


def _files(view: Row) -> str | None:
    if "is_managed" not in view:
        return None
    return "read and deleted by the daemon" if view["is_managed"] else "outside `checkpoint_roots`: workers delete them"
