"""Finds the checkpoint that a command line names: by its id, the beginning of its id, its step, or as the latest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.errors import RequestRefused
from forged.plain_client.connection import PlainConnection

LATEST = "latest"
"""The checkpoint that the job would be restored from now."""
STEP = "@"
"""Stands before a step."""
UNKNOWN = frozenset({"checkpoint_unknown"})


def find(daemon: PlainConnection, job: str, name: str) -> Row:
    """The reply of `ShowCheckpoint` about the named checkpoint."""
    if name == LATEST:
        return show(daemon, job, _latest(daemon, job))
    if not name.startswith(STEP):
        found = answers.one_unless(daemon, UNKNOWN, "ShowCheckpoint", job=job, checkpoint_id=name)
        if found:
            return found
    return show(daemon, job, _matching(daemon, job, name))


def path_of(daemon: PlainConnection, job: str, name: str) -> str:
    """Where the named checkpoint is stored, as its writer has named the place."""
    return f"{answers.map_in(find(daemon, job, name), 'meta').get('storage_path')}"


def show(daemon: PlainConnection, job: str, checkpoint_id: Any) -> Row:
    """The reply of `ShowCheckpoint`."""
    return answers.one(daemon, "ShowCheckpoint", job=job, checkpoint_id=checkpoint_id)


def listed(daemon: PlainConnection, job: str, **fields: Any) -> Row:
    """The reply of `ListCheckpoints` with all checkpoints of the job, newest first."""
    return answers.whole(daemon, "ListCheckpoints", field="checkpoints", key="checkpoint_id", job=job, **fields)


def require_job(daemon: PlainConnection, job: str) -> None:
    """Refuse a job that does not exist: the catalogue has no checkpoints of it, which is no answer to a wrong name."""
    answers.one(daemon, "ShowJob", job=job)


def described(meta: Row) -> str:
    """A checkpoint in a sentence: its id with its step."""
    return f"{tables.field('', meta.get('checkpoint_id'))} (step {tables.field('', meta.get('step'))})"


def _latest(daemon: PlainConnection, job: str) -> Any:
    points = answers.rows_in(answers.one(daemon, "FindRestorePoints", job=job, limit=1), "points")
    if not points:
        raise RequestRefused(
            "checkpoint_missing",
            f"job {job} has no checkpoint to restore from",
            f"see `forgectl ckpt restore-point --job {job}`",
        )
    return answers.map_in(points[0], "meta").get("checkpoint_id")


def _matching(daemon: PlainConnection, job: str, name: str) -> Any:
    """The id of the only checkpoint with this step, or this beginning of its id."""
    if "/" in name:
        raise RequestRefused(
            "checkpoint_unknown",
            f"{name!r} is a path, and with --job a checkpoint is named by its id",
            "omit --job to read the path",
        )
    found = list(_candidates(answers.rows_in(listed(daemon, job), "checkpoints"), name))
    if not found:
        raise RequestRefused(
            "checkpoint_unknown",
            f"job {job} has no checkpoint {name!r}",
            f"name one by id, by the beginning of its id, as {STEP}STEP or as {LATEST}; "
            f"see `forgectl ckpt ls --job {job}`",
        )
    if len(found) > 1:
        raise RequestRefused(
            "checkpoint_ambiguous",
            f"{name!r} names {len(found):,} checkpoints of job {job}: {_names(found)}",
            "give the id of one",
        )
    return found[0].get("checkpoint_id")


def _candidates(checkpoints: Sequence[Row], name: str) -> Iterator[Row]:
    step = name.removeprefix(STEP)
    for meta in checkpoints:
        if name.startswith(STEP):
            if f"{meta.get('step')}" == step:
                yield meta
        elif f"{meta.get('checkpoint_id')}".startswith(name):
            yield meta


def _names(found: Sequence[Row]) -> str:
    shown = ", ".join(map(described, found[: tables.NAMES_MAX]))
    return shown if len(found) <= tables.NAMES_MAX else f"{shown} and {len(found) - tables.NAMES_MAX:,} more"
