"""`forgectl ckpt adopt`: adds the checkpoints of a folder to the catalogue of a job.

Invariants:
- The manifests are read by this process; the daemon learns what they say.
- A parent is sent before the checkpoints that build on it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import msgpack

from forged.checkpoint.errors import ExceptionType
from forged.checkpoint.format.manifest import Manifest
from forged.checkpoint.ports import CancelToken, Storage
from forged.checkpoint.storage import listing
from forged.cli.ckpt.command import checkpoint_command
from forged.cli.ckpt.target import storage_of
from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_FAILED, EXIT_OK
from forged.pagination import in_batches
from forged.plain_client.connection import PlainConnection

BATCH_MAX = 1000
REFUSED_SHOWN_MAX = 12
METRICS_KEY = "metrics"
"""The custom metadata in which workers save the metrics."""
OUTCOMES = ("adopted", "known", "refused")


@checkpoint_command
def adopt(options: Options, token: CancelToken) -> int:
    storage = storage_of(options.where, token)
    found, unreadable = _described(storage)
    done: dict[str, list[Any]] = {outcome: [] for outcome in OUTCOMES}
    with DaemonConnection(options) as daemon:
        for batch in batches(found, is_dry=options.dry_run):
            reply = answers.one(
                daemon,
                "AdoptCheckpoints",
                job=options.job,
                folder=storage.url,
                checkpoints=batch,
                dry_run=options.dry_run,
            )
            for outcome in OUTCOMES:
                done[outcome] += answers.list_in(reply, outcome)
        remarks = [] if options.dry_run else list(_remarks(daemon, options.job, set(done["adopted"])))
    whole = {"job": options.job, "folder": storage.url, "dry_run": options.dry_run, **done, "unreadable": unreadable}
    whole["remarks"] = remarks
    answer(options, whole, lambda: _show(whole))
    return EXIT_FAILED if done["refused"] or unreadable or not found else EXIT_OK


def _remarks(daemon: PlainConnection, job: str, adopted: set[Any]) -> Iterator[str]:
    """A note if the retention policy deletes some of the adopted checkpoints."""
    page = answers.whole(daemon, "ReadRetention", field="verdicts", key="checkpoint_id", job=job)
    going = [
        verdict
        for verdict in answers.rows_in(page, "verdicts")
        if verdict.get("checkpoint_id") in adopted and verdict.get("is_kept") is False
    ]
    if going:
        size = tables.size(sum(answers.count_in(verdict, "size_bytes") for verdict in going))
        yield (
            f"the retention policy of the job deletes {tables.counted(len(going), 'checkpoint')} of them, {size}, "
            f"within seconds, such as that of step {tables.field('', going[0].get('step'))}; "
            "`forgectl ckpt pin` keeps one, `forgectl jobs change` changes the policy"
        )


def batches(found: Sequence[Row], *, is_dry: bool) -> Iterator[list[Row]]:
    """The checkpoints in the parts that one request can carry.

    In a dry run the daemon keeps no part, so a checkpoint is sent without a parent that is in an earlier one.
    """
    sent: set[str] = set()
    for batch in in_batches(found, msgpack.packb, BATCH_MAX):
        yield [one | {"parent_path": ""} if is_dry and one.get("parent_path") in sent else one for one in batch]
        sent.update(one["storage_path"] for one in batch)


# What the folder has.


def _described(storage: Storage) -> tuple[list[Row], list[Row]]:
    """The checkpoints of a folder as the daemon takes them, parents first; and those that cannot be read."""
    found: dict[str, Row] = {}
    unreadable: list[Row] = []
    for prefix, manifest in listing.manifests(storage):
        if isinstance(manifest, Manifest):
            one = as_adopted(manifest, storage.url)
            found[one["storage_path"]] = one
        elif manifest.retryable or manifest.type is ExceptionType.TIMEOUT:
            raise manifest
        else:
            unreadable.append({"prefix": prefix, "code": manifest.code, "message": manifest.message})
    return parents_first(found), unreadable


def as_adopted(manifest: Manifest, folder: str) -> Row:
    """A checkpoint as `AdoptedCheckpoint` describes it."""
    metrics = manifest.custom.get(METRICS_KEY)
    parent = {"parent_path": f"{folder}/{manifest.links[-1].prefix}"} if manifest.links else {}
    return parent | {
        "storage_path": f"{folder}/{manifest.prefix}",
        "save_id": manifest.save_id,
        "epoch": manifest.epoch or 0,
        "step": manifest.step or 0,
        "size_bytes": manifest.size_bytes,
        "created_at": manifest.created_at,
        "metrics": {key: float(value) for key, value in _items(metrics) if _is_finite(value)},
        "job": manifest.job,
    }


def _items(metrics: Any) -> Iterator[tuple[str, Any]]:
    yield from metrics.items() if isinstance(metrics, dict) else ()


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def parents_first(found: Mapping[str, Row]) -> list[Row]:
    """The checkpoints by path in an order in which each follows the one that it builds on."""
    by_age = sorted(found, key=lambda path: (found[path]["created_at"], path))
    graph = {path: {f"{found[path].get('parent_path')}"} & found.keys() for path in by_age}
    try:
        return [found[path] for path in TopologicalSorter(graph).static_order()]
    except CycleError:
        # The daemon refuses those of the cycle, and names them.
        return [found[path] for path in by_age]


# Output.


def _show(whole: Row) -> None:
    folder, job = tables.field("", whole["folder"]), whole["job"]
    adopted, known, refused = (whole[outcome] for outcome in OUTCOMES)
    if not (adopted or known or refused or whole["unreadable"]):
        print(f"no checkpoints in {folder}; name the folder that the manifests (*.metadata.json) are in")
        return
    number = f"{tables.counted(len(adopted), 'checkpoint')} of {folder}"
    if adopted and whole["dry_run"]:
        print(f"job {job} would adopt {number}; nothing is changed")
    elif adopted:
        print(f"job {job} has adopted {number}: {tables.names(adopted)}")
    if known:
        print(f"known before: {tables.counted(len(known), 'checkpoint')}: {tables.names(known)}")
    refusals = list(_refusals(refused, whole["unreadable"]))
    shown = refusals[: REFUSED_SHOWN_MAX - 1] if _is_cut(refusals) else refusals
    for text in shown:
        tables.print_wrapped(text, tables.NOTE_INDENT)
    if len(shown) < len(refusals):
        print(f"and {len(refusals) - len(shown):,} more: --json shows them")
    tables.notes(whole)


def _is_cut(refusals: Sequence[str]) -> bool:
    return sys.stdout.isatty() and len(refusals) > REFUSED_SHOWN_MAX


def _refusals(refused: Sequence[Any], unreadable: Sequence[Row]) -> Iterator[str]:
    for one in refused:
        yield f"refused: {tables.field('', one)}"
    for row in unreadable:
        yield f"cannot be read: {tables.field('', row['prefix'])}: {tables.field('', row['message'])}"
