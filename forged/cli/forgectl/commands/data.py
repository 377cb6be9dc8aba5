"""`forgectl data`: training data, and how other commands describe it.

An audit fails only on proof: an epoch that a later epoch follows must be complete, and no sample may be used twice. An
epoch that is still running, or never started, is reported and is no failure.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row, count_in
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options, Parser, verb, verbs_of
from forged.cli.process import EXIT_FAILED, EXIT_OK
from forged.plain_client.connection import PlainConnection

WITHOUT_DATA = frozenset({"job_without_data"})
UNTOLD = WITHOUT_DATA | {"request_unknown"}
REMOVED = frozenset({"job_unknown"})
"""The job was removed between two requests."""
EPOCHS_AUDITED_MAX = 1000
"""The newest epochs, if none is named."""
EPOCH_DIGITS_MAX = 18
EPOCH_END = 10**EPOCH_DIGITS_MAX
RANGES_SHOWN_MAX = 8
LIST_COLUMNS = ("job", "samples", "shards", "replication", "has_origin", "generation", "workers")
LOST_COLUMNS = ("lost_shards", "lost_because", "last_held_by")
WORKER_COLUMNS = ("worker_id", "owned", "copies", "samples")


# Commands.


def fill(data: Parser) -> None:
    """Add the verbs."""
    verbs = verbs_of(data, _list)
    verb(verbs, "ls", _list, "list the datasets of all jobs", aliases=["list"])
    of_job(verb(verbs, "show", _show, "show a job's dataset and the shards of each worker"))
    audit = of_job(verb(verbs, "audit", _audit, "check that each sample of an epoch was used exactly once"))
    audit.add_argument("--epoch", type=_epoch, metavar="E", help="only this epoch (default: all recorded epochs)")


def of_job(parser: Parser) -> Parser:
    """Add the required `--job`."""
    parser.add_argument("--job", required=True, metavar="JOB", help="the job")
    return parser


def _epoch(text: str) -> int:
    if not text.isdecimal() or len(text) > EPOCH_DIGITS_MAX:
        raise argparse.ArgumentTypeError(f"an epoch must be an integer >= 0, got {text!r}")
    return int(text)


def _list(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        jobs = answers.pages(daemon, "ListJobs", field="jobs", key="name")
        found = [
            view
            for job in jobs
            if (view := answers.one_unless(daemon, WITHOUT_DATA | REMOVED, "ShowData", job=job.get("name")))
        ]
    rows = [one | _row(one.get("dataset")) | {"workers": len(answers.rows_in(one, "workers"))} for one in found]
    answer(options, {"data": found}, lambda: tables.table(rows, LIST_COLUMNS, "no job has a dataset"))
    return EXIT_OK


def _show(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        view = answers.one(daemon, "ShowData", job=options.job)
    answer(options, view, lambda: _print_view(view))
    return EXIT_OK


def _print_view(view: Row) -> None:
    lost = count_in(view, "lost")
    left_out = {"workers"}
    if not lost:
        left_out |= {"lost", *LOST_COLUMNS}
    if not count_in(view, "differing"):
        left_out |= {"differing", "differing_shards"}
    whole = {key: value for key, value in view.items() if key not in left_out}
    tables.pairs(whole | {"dataset": dataset_in_words(view.get("dataset"))})
    if lost and (by := answers.list_in(view, "last_held_by")):
        print(f"the lost shards were {restart_hint(by)}")
    print()
    workers = answers.rows_in(view, "workers")
    is_weighted = any(worker.get("weight", 1) != 1 for worker in workers)
    columns = (*WORKER_COLUMNS, "weight") if is_weighted else WORKER_COLUMNS
    tables.table(workers, columns, "no worker holds any shard")


def _audit(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        first = answers.one(daemon, "AuditData", job=options.job, epoch=options.epoch)
        span = _span(first) if options.epoch is None else [first.get("epoch")]
        audits = list(_audits(daemon, options.job, first, span[-EPOCHS_AUDITED_MAX:]))
    is_right, left_out = not any(map(_is_wrong, audits)), len(span) - len(audits)
    whole = {"job": options.job, "ok": is_right, "epochs_left_out": left_out, "audits": audits}
    answer(options, whole, lambda: _print_audits(audits, left_out))
    return EXIT_OK if is_right else EXIT_FAILED


# Requests.


def planned_transfers(daemon: PlainConnection, job: str, workers: Sequence[Any], gone: Sequence[Any]) -> Row:
    """The transfers to a world of these workers, by rank, if the `gone` workers have failed; empty without data."""
    # An older daemon does not know the field `gone`.
    return answers.one_unless(daemon, UNTOLD, "PlanData", job=job, workers=workers, **({"gone": gone} if gone else {}))


def _audits(daemon: PlainConnection, job: str, first: Row, epochs: Sequence[Any]) -> Iterator[Row]:
    """The audits of these epochs, of which `first` is one; `over` if a later epoch has begun."""
    newest = max(_recorded(first), default=-1)
    for number in epochs:
        view = first if number == first.get("epoch") else answers.one(daemon, "AuditData", job=job, epoch=number)
        is_over = isinstance(number, int) and number < newest
        yield {key: value for key, value in view.items() if key != "epochs"} | {"over": is_over}


def _span(first: Row) -> Sequence[Any]:
    """The epochs to audit. An epoch between recorded ones that has no record was not used, and is not skipped."""
    recorded = _recorded(first)
    return range(min(recorded), max(recorded) + 1) if recorded else [first.get("epoch")]


def _recorded(first: Row) -> list[int]:
    return [one for one in answers.list_in(first, "epochs") if type(one) is int and 0 <= one < EPOCH_END]


def _is_wrong(audit: Row) -> bool:
    contradicts = count_in(audit, "repeated_total") or answers.rows_in(audit, "conflicts")
    return bool(contradicts or (audit["over"] and not audit.get("complete")))


# Output.


def _print_audits(audits: Sequence[Row], left_out: int) -> None:
    """Print a line for each epoch, or for consecutive epochs with the same result."""
    if left_out:
        print(f"{tables.counted(left_out, 'older epoch')} not audited: choose one with --epoch")
    for (finding, details), group in groupby(audits, lambda audit: (_finding(audit), tuple(_details(audit)))):
        epochs = [tables.field("", audit.get("epoch")) for audit in group]
        several = len(epochs) > 1
        name = f"epochs {epochs[0]} to {epochs[-1]}" if several else f"epoch {epochs[0]}"
        print(f"{name}: {finding}{' in each' if several else ''}")
        for detail in details:
            print(f"  {detail}")


def _finding(audit: Row) -> str:
    samples, dropped = count_in(audit, "samples"), count_in(audit, "dropped")
    once = max(0, count_in(audit, "used") - count_in(audit, "repeated_total"))
    said = f"{once:,} of {samples:,} samples used once"
    if dropped:
        said += f", {dropped:,} dropped by configuration"
    if answers.rows_in(audit, "conflicts"):
        return f"{said}, as far as the reports agree"
    if audit.get("complete"):
        return said
    return f"{said}; {'the epoch is over and incomplete' if audit['over'] else 'the epoch is still running'}"


def _details(audit: Row) -> Iterator[str]:
    if audit.get("forgotten"):
        yield "training was restored to the middle of this epoch: its earlier samples are unknown"
    if count_in(audit, "repeated_total"):
        yield f"used more than once: {_positions(audit, 'repeated')}"
    if conflicts := answers.rows_in(audit, "conflicts"):
        yield f"workers contradict each other, so their reports prove nothing: {_conflicts(conflicts)}"
    if audit["over"] and count_in(audit, "missing_total"):
        yield f"not reported as used: {_positions(audit, 'missing')}"


def _conflicts(conflicts: Sequence[Row]) -> str:
    """The workers and steps of contradicting reports."""
    shown = ", ".join(
        f"{tables.field('', one.get('worker_id'))} at step {tables.field('', one.get('step'))}"
        for one in conflicts[:RANGES_SHOWN_MAX]
    )
    return shown if len(conflicts) <= RANGES_SHOWN_MAX else f"{shown} and {len(conflicts) - RANGES_SHOWN_MAX:,} more"


def _positions(audit: Row, key: str) -> str:
    """The number of positions in the epoch's order, and the first ranges of them."""
    ranges = [one for one in answers.list_in(audit, key) if isinstance(one, list) and len(one) == 2]
    shown = ", ".join(
        f"[{tables.field('', start)}, {tables.field('', end)})" for start, end in ranges[:RANGES_SHOWN_MAX]
    )
    more = "" if len(ranges) <= RANGES_SHOWN_MAX else f" and {len(ranges) - RANGES_SHOWN_MAX:,} more ranges"
    return f"{count_in(audit, f'{key}_total'):,} positions: {shown}{more}"


def print_planned_transfers(totals: Row) -> None:
    """Print the transfers that a plan needs; nothing for a job without data."""
    if not totals:
        return
    print()
    if not count_in(totals, "transfers"):
        print("no shard moves")
        return
    tables.pairs(
        {
            "shards": totals.get("shards"),
            "transfers": f"{count_in(totals, 'transfers'):,} ({_sources(totals)})",
            "bytes": tables.size(count_in(totals, "bytes")) if count_in(totals, "bytes") else None,
            "estimated_s": totals.get("estimated_s") or None,
        }
    )


def dataset_in_words(dataset: Any) -> str:
    """A dataset as part of a sentence; empty for anything else."""
    if not isinstance(dataset, dict):
        return ""
    replicas = count_in(dataset, "replication")
    replication = f"{tables.counted(replicas, 'replica')} of each" if replicas else "no replicas"
    origin = "with an origin" if dataset.get("has_origin") else "without an origin"
    samples, shards = count_in(dataset, "samples"), tables.counted(count_in(dataset, "shards"), "shard")
    return f"{samples:,} samples in {shards}, {replication}, {origin}"


def totals_in_words(totals: Any) -> str:
    """Transfers as part of a sentence; empty for anything else."""
    if not isinstance(totals, dict):
        return ""
    if not count_in(totals, "transfers"):
        return "no shard moves"
    said = f"{tables.counted(count_in(totals, 'transfers'), 'transfer')}, {_sources(totals)}"
    if size := count_in(totals, "bytes"):
        said += f", {tables.size(size)}"
    estimated_s = totals.get("estimated_s")
    return f"{said}, estimated {tables.field('_s', estimated_s)}" if estimated_s else said


def restart_hint(workers: Sequence[Any]) -> str:
    """How to bring lost shards back: restart the workers that held them last."""
    them = "it with its directory" if len(workers) == 1 else "each of them with its directory"
    return f"last held by {tables.names(workers)}: restart {them}"


def _sources(totals: Row) -> str:
    named = (
        ("from_owners", "from owners"),
        ("from_replicas", "from replicas"),
        ("from_origin", "from the origin"),
    )
    return ", ".join(f"{count_in(totals, key):,} {name}" for key, name in named if count_in(totals, key)) or "no source"


def _row(value: Any) -> Row:
    return value if isinstance(value, dict) else {}
