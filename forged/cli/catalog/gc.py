"""`forgectl ckpt gc`: what the retention policy of a job keeps and collects, and a collection now."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from forged.cli.catalog.ls import SHOWN_MAX, size_text
from forged.cli.catalog.names import require_job
from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row, count_in
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_OK

COLUMNS = ("id", "step", "verdict", "rule", "size", "reason")
COLLECTED_COLUMNS = ("id", "step", "rule", "size", "reason")
YIELDING = ("rule", "reason")
RECENT = "recent"
"""The rule of what no setting limits, or not yet."""
KEPT, GOES = "kept", "goes"


def collect(options: Options) -> int:
    return _preview(options) if options.dry_run else _collect(options)


def _preview(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        page = answers.whole(daemon, "ReadRetention", field="verdicts", key="checkpoint_id", job=options.job)
        if not answers.rows_in(page, "verdicts"):
            require_job(daemon, options.job)
    answer(options, page, lambda: _show_preview(options, page))
    return EXIT_OK


def _show_preview(options: Options, page: Row) -> None:
    verdicts = answers.rows_in(page, "verdicts")
    # What goes comes first, because it is what the reader decides about.
    ordered = sorted(verdicts, key=lambda verdict: verdict.get("is_kept") is not False)
    _table(options, ordered, COLUMNS, f"job {options.job} has no checkpoints")
    if not verdicts:
        return
    going = sum(verdict.get("is_kept") is False for verdict in verdicts)
    whole = tables.counted(len(verdicts), "checkpoint")
    if going:
        regained = tables.size(count_in(page, "regained_bytes"))
        print(f"\na collection would delete {going:,} of {whole} and regain {regained}")
    else:
        hint = f"; {_settings(options.job)}" if any(verdict.get("rule") == RECENT for verdict in verdicts) else ""
        print(f"\na collection would delete none of {whole}{hint}")


def _collect(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        reply = answers.one(daemon, "CollectCheckpoints", job=options.job)
        if not answers.rows_in(reply, "collected"):
            require_job(daemon, options.job)
    answer(options, reply, lambda: _show_collected(options, reply))
    return EXIT_OK


def _show_collected(options: Options, reply: Row) -> None:
    collected = answers.rows_in(reply, "collected")
    nothing = (
        f"no checkpoint of job {options.job} is collected; "
        f"`forgectl ckpt gc --dry-run --job {options.job}` tells why each is kept"
    )
    _table(options, collected, COLLECTED_COLUMNS, nothing)
    if collected:
        regained = tables.size(count_in(reply, "regained_bytes"))
        print(f"\ncollected {tables.counted(len(collected), 'checkpoint')}, {regained}; their files are being deleted")


def _settings(job: str) -> str:
    return (
        f"the settings checkpoint_keep and checkpoint_max_age_s limit them (`forgectl jobs show {job}`), "
        "or `keep=` of the script if there are none"
    )


def _table(options: Options, verdicts: Sequence[Row], columns: Sequence[str], nothing: str) -> None:
    is_cut = sys.stdout.isatty() and not options.all and len(verdicts) > SHOWN_MAX
    shown = verdicts[: SHOWN_MAX - 1] if is_cut else verdicts
    tables.table([_row(verdict) for verdict in shown], columns, nothing, yielding=YIELDING, kept="id")
    if is_cut:
        print(f"and {len(verdicts) - len(shown):,} more checkpoints: --all shows them")


def _row(verdict: Row) -> dict[str, Any]:
    return verdict | {
        "id": verdict.get("checkpoint_id"),
        "verdict": KEPT if verdict.get("is_kept") is not False else GOES,
        "size": size_text(verdict.get("size_bytes")),
    }
