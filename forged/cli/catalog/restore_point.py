"""`forgectl ckpt restore-point`: what a job would be restored from, why, and what that loses."""

from __future__ import annotations

import os
import sys
from typing import Any

from forged.cli.catalog import names
from forged.cli.catalog.ls import SHOWN_MAX, size_text
from forged.cli.catalog.show import chain_text, estimate_text
from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_FAILED, EXIT_OK

COLUMNS = ("id", "step", "type", "size", "chain", "restore_s", "lost_steps", "reason")
EXCLUDED_SHOWN_MAX = 12
YIELDING = ("chain", "size", "reason")


def show_restore_points(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        reply = answers.one(daemon, "FindRestorePoints", job=options.job, **_criteria(options))
    answer(options, reply, lambda: _show(options, reply))
    return EXIT_OK if answers.rows_in(reply, "points") else EXIT_FAILED


def _criteria(options: Options) -> dict[str, Any]:
    given = {"folder": _location(options.folder), "max_epoch": options.max_epoch, "max_step": options.max_step}
    criteria = {key: value for key, value in given.items() if value not in (None, "")}
    return criteria | ({"prefer_full": True} if options.prefer_full else {})


def _location(folder: str | None) -> str:
    """The folder as the catalogue names it: a directory with its links followed, or a URL."""
    return (folder if "://" in folder else os.path.realpath(folder)).rstrip("/") if folder else ""


def _show(options: Options, reply: Row) -> None:
    points = answers.rows_in(reply, "points")
    if points:
        _show_best(points[0])
    else:
        print(f"job {options.job} has no checkpoint {'that matches' if _criteria(options) else 'to restore from'}")
    if len(points) > 1:
        print("\nif it cannot be read, in this order:")
        is_cut = sys.stdout.isatty() and not options.all and len(points) > SHOWN_MAX
        shown = points[1:SHOWN_MAX] if is_cut else points[1:]
        tables.table([_row(point) for point in shown], COLUMNS, "", yielding=YIELDING, kept="id")
        if is_cut:
            print(f"and {len(points) - 1 - len(shown):,} more checkpoints: --all shows them")
    _show_excluded(options, reply)


def _show_best(point: Row) -> None:
    meta = answers.map_in(point, "meta")
    chain = answers.list_in(point, "chain")
    shown = {
        "restore": names.described(meta),
        "path": meta.get("storage_path"),
        "why": point.get("reason"),
        "takes": estimate_text(answers.map_in(point, "estimate")),
        "reads": chain_text(chain) if len(chain) > 1 else None,
        "loses": _loss(point),
    }
    tables.pairs({key: value for key, value in shown.items() if value})


def _loss(point: Row) -> str:
    steps, seconds = answers.count_in(point, "lost_steps"), point.get("lost_s")
    if not steps:
        return "no committed step"
    trained = f", {tables.duration(seconds)} of training" if isinstance(seconds, (int, float)) and seconds > 0 else ""
    return f"{tables.counted(steps, 'step')}{trained}"


def _row(point: Row) -> dict[str, Any]:
    meta = answers.map_in(point, "meta")
    return {
        "id": meta.get("checkpoint_id"),
        "step": meta.get("step"),
        "type": meta.get("checkpoint_type"),
        "size": size_text(meta.get("size_bytes")),
        "chain": len(answers.list_in(point, "chain")),
        "restore_s": answers.map_in(point, "estimate").get("expected_s"),
        "lost_steps": point.get("lost_steps"),
        "reason": point.get("reason"),
    }


def _show_excluded(options: Options, reply: Row) -> None:
    excluded = answers.rows_in(reply, "excluded")
    if excluded:
        print("\nnot offered:")
    is_cut = sys.stdout.isatty() and not options.all and len(excluded) > EXCLUDED_SHOWN_MAX
    shown = excluded[: EXCLUDED_SHOWN_MAX - 1] if is_cut else excluded
    for one in shown:
        tables.print_wrapped(f"  {names.described(one)}: {tables.field('', one.get('reason'))}", 2 * tables.NOTE_INDENT)
    if is_cut:
        print(f"  and {len(excluded) - len(shown):,} more: --all shows them")
