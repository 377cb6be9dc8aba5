"""`forgectl data`, and what plans and facts have to say about training data.

Law: an audit fails only by what is proven: an epoch behind which another has begun has to be complete, and nothing may
be used twice. What is not over yet, or was never begun, is told and is no failure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row, count_in
from forged.cli.forgectl.connection import Connection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options, Parser, verb, verbs_of
from forged.cli.process import EXIT_FAILED, EXIT_OK
from forged.errors import RequestRefused
from forged.plain_client.connection import Wire

DATALESS = frozenset({"job_without_data"})
UNTOLD = DATALESS | {"request_unknown"}
GONE = frozenset({"job_unknown"})
"""What a job may be between two questions."""
EPOCHS_AUDITED_MAX = 1000
"""The newest, where none is named."""
EPOCH_DIGITS_MAX = 18
EPOCH_END = 10**EPOCH_DIGITS_MAX
RANGES_SHOWN_MAX = 8
LIST_COLUMNS = ("job", "samples", "shards", "replication", "has_origin", "generation", "workers")
LOST_COLUMNS = ("lost_shards", "lost_because", "last_held_by")
WORKER_COLUMNS = ("worker_id", "owned", "copies", "samples")


# Commands.


def fill(data: Parser) -> None:
    """What can be asked about training data."""
    verbs = verbs_of(data, _list)
    verb(verbs, "ls", _list, "the datasets of all jobs", aliases=["list"])
    of_job(verb(verbs, "show", _show, "a job's dataset, and what each worker holds of it"))
    audit = of_job(verb(verbs, "audit", _audit, "prove that each sample was used once, or tell which was not"))
    audit.add_argument(
        "--epoch", type=_epoch, metavar="E", help="only this epoch; else all of which something is known"
    )


def of_job(parser: Parser) -> Parser:
    """Has to be told which job is meant."""
    parser.add_argument("--job", required=True, metavar="JOB", help="whose data")
    return parser


def _epoch(text: str) -> int:
    if not text.isdecimal() or len(text) > EPOCH_DIGITS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of an epoch; they count from 0")
    return int(text)


def _list(options: Options) -> int:
    with Connection(options) as wire:
        jobs = answers.pages(wire, "ListJobs", field="jobs", key="name")
        found = [view for job in jobs if (view := _data_of(wire, job.get("name")))]
    rows = [one | _row(one.get("dataset")) | {"workers": len(answers.rows_in(one, "workers"))} for one in found]
    answer(options, {"data": found}, lambda: tables.table(rows, LIST_COLUMNS, "no job has a dataset"))
    return EXIT_OK


def _data_of(wire: Wire, job: Any) -> Row:
    try:
        return answers.one(wire, "ShowData", job=job)
    except RequestRefused as refusal:
        if refusal.code not in DATALESS | GONE:
            raise
        return {}


def _show(options: Options) -> int:
    with Connection(options) as wire:
        view = answers.one(wire, "ShowData", job=options.job)
    answer(options, view, lambda: _show_view(view))
    return EXIT_OK


def _show_view(view: Row) -> None:
    lost = count_in(view, "lost")
    left_out = {"workers"}
    if not lost:
        left_out |= {"lost", *LOST_COLUMNS}
    if not count_in(view, "differing"):
        left_out |= {"differing", "differing_shards"}
    whole = {key: value for key, value in view.items() if key not in left_out}
    tables.pairs(whole | {"dataset": dataset_in_words(view.get("dataset"))})
    if lost and (by := answers.list_in(view, "last_held_by")):
        print(f"the lost shards were {brought_back_by(by)}")
    print()
    workers = answers.rows_in(view, "workers")
    is_weighted = any(worker.get("weight", 1) != 1 for worker in workers)
    columns = (*WORKER_COLUMNS, "weight") if is_weighted else WORKER_COLUMNS
    tables.table(workers, columns, "nobody holds any of it")


def _audit(options: Options) -> int:
    with Connection(options) as wire:
        asked = answers.one(wire, "AuditData", job=options.job, epoch=options.epoch)
        span = _span(asked) if options.epoch is None else [asked.get("epoch")]
        audits = list(_audits(wire, options.job, asked, span[-EPOCHS_AUDITED_MAX:]))
    is_right, left_out = not any(map(_is_wrong, audits)), len(span) - len(audits)
    whole = {"job": options.job, "ok": is_right, "epochs_left_out": left_out, "audits": audits}
    answer(options, whole, lambda: _show_audits(audits, left_out))
    return EXIT_OK if is_right else EXIT_FAILED


# What is asked.


def travelling(wire: Wire, job: str, workers: Sequence[Any], gone: Sequence[Any]) -> Row:
    """What would have to travel if these were the workers, by rank, and these were gone; nothing of a job without
    data."""
    try:
        # An older daemon knows of nobody who is gone.
        return answers.one(wire, "PlanData", job=job, workers=workers, **({"gone": gone} if gone else {}))
    except RequestRefused as refusal:
        if refusal.code not in UNTOLD:
            raise
        return {}


def _audits(wire: Wire, job: str, asked: Row, epochs: Sequence[Any]) -> Iterator[Row]:
    """What is proven of these epochs, of one of which it was asked already; `over` if another has begun."""
    newest = max(_known(asked), default=-1)
    for number in epochs:
        view = asked if number == asked.get("epoch") else answers.one(wire, "AuditData", job=job, epoch=number)
        is_over = isinstance(number, int) and number < newest
        yield {key: value for key, value in view.items() if key != "epochs"} | {"over": is_over}


def _span(asked: Row) -> Sequence[Any]:
    """The epochs to be looked at. One in between of which nothing is known was not used, and is not passed over."""
    known = _known(asked)
    return range(min(known), max(known) + 1) if known else [asked.get("epoch")]


def _known(asked: Row) -> list[int]:
    return [one for one in answers.list_in(asked, "epochs") if type(one) is int and 0 <= one < EPOCH_END]


def _is_wrong(audit: Row) -> bool:
    contradicts = count_in(audit, "repeated_total") or answers.rows_in(audit, "conflicts")
    return bool(contradicts or (audit["over"] and not audit.get("complete")))


# How it looks.


def _show_audits(audits: Sequence[Row], left_out: int) -> None:
    """A line for each epoch, or for several in a row of which the same is to be said."""
    if left_out:
        print(f"{left_out:,} older epoch{'' if left_out == 1 else 's'} not looked at: name one by --epoch")
    for (said, details), group in groupby(audits, lambda audit: (_finding(audit), tuple(_details(audit)))):
        epochs = [tables.field("", audit.get("epoch")) for audit in group]
        several = len(epochs) > 1
        name = f"epochs {epochs[0]} to {epochs[-1]}" if several else f"epoch {epochs[0]}"
        print(f"{name}: {said}{' in each' if several else ''}")
        for detail in details:
            print(f"  {detail}")


def _finding(audit: Row) -> str:
    samples, dropped = count_in(audit, "samples"), count_in(audit, "dropped")
    once = max(0, count_in(audit, "used") - count_in(audit, "repeated_total"))
    said = f"{once:,} of {samples:,} samples used once"
    if dropped:
        said += f", {dropped:,} left out on purpose"
    if answers.rows_in(audit, "conflicts"):
        return f"{said}, as far as can be told"
    if audit.get("complete"):
        return said
    return f"{said}; {'it is over, and not complete' if audit['over'] else 'it is not over yet'}"


def _details(audit: Row) -> Iterator[str]:
    if audit.get("forgotten"):
        yield "the training went back into the middle of it: what was used before that is not known any more"
    if count_in(audit, "repeated_total"):
        yield f"used more than once: {_positions(audit, 'repeated')}"
    if conflicts := answers.rows_in(audit, "conflicts"):
        yield f"workers tell differently of what was used, which proves nothing: {_conflicts(conflicts)}"
    if audit["over"] and count_in(audit, "missing_total"):
        yield f"not known to be used: {_positions(audit, 'missing')}"


def _conflicts(conflicts: Sequence[Row]) -> str:
    """Who has contradicted others, and of which steps."""
    shown = ", ".join(
        f"{tables.field('', one.get('worker_id'))} of step {tables.field('', one.get('step'))}"
        for one in conflicts[:RANGES_SHOWN_MAX]
    )
    return shown if len(conflicts) <= RANGES_SHOWN_MAX else f"{shown} and {len(conflicts) - RANGES_SHOWN_MAX:,} more"


def _positions(audit: Row, key: str) -> str:
    """How many places of the epoch's order, and the first of them."""
    ranges = [one for one in answers.list_in(audit, key) if isinstance(one, list) and len(one) == 2]
    shown = ", ".join(
        f"[{tables.field('', start)}, {tables.field('', end)})" for start, end in ranges[:RANGES_SHOWN_MAX]
    )
    more = "" if len(ranges) <= RANGES_SHOWN_MAX else f" and {len(ranges) - RANGES_SHOWN_MAX:,} more ranges"
    return f"{count_in(audit, f'{key}_total'):,} positions: {shown}{more}"


def show_travelling(totals: Row) -> None:
    """What would have to travel, of a job with data."""
    if not totals:
        return
    print()
    if not count_in(totals, "transfers"):
        print("no data would have to travel")
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
    """A dataset as it stands in a sentence; empty where this is none."""
    if not isinstance(dataset, dict):
        return ""
    copies = count_in(dataset, "replication")
    further = f"{copies} further {'copy' if copies == 1 else 'copies'} of each" if copies else "no further copies"
    origin = "with an origin" if dataset.get("has_origin") else "without an origin"
    samples, shards = count_in(dataset, "samples"), shards_in_words(count_in(dataset, "shards"))
    return f"{samples:,} samples in {shards}, {further}, {origin}"


def totals_in_words(totals: Any) -> str:
    """What has to travel, as it stands in a sentence; empty where this is none."""
    if not isinstance(totals, dict):
        return ""
    if not count_in(totals, "transfers"):
        return "no data has to travel"
    said = f"{shards_in_words(count_in(totals, 'transfers'))} to travel, {_sources(totals)}"
    if size := count_in(totals, "bytes"):
        said += f", {tables.size(size)}"
    estimated_s = totals.get("estimated_s")
    return f"{said}, in about {tables.field('_s', estimated_s)}" if estimated_s else said


def brought_back_by(workers: Sequence[Any]) -> str:
    """Who had lost shards last, and has to be started again for them."""
    it = "it again with its directory" if len(workers) == 1 else "them again, each with its directory"
    return f"last with {tables.names(workers)}: start {it}"


def shards_in_words(count: int) -> str:
    """So many shards."""
    return f"{count:,} shard{'' if count == 1 else 's'}"


def _sources(totals: Row) -> str:
    named = (
        ("from_owners", "from owners"),
        ("from_replicas", "from further copies"),
        ("from_origin", "from the origin"),
    )
    return (
        ", ".join(f"{count_in(totals, key):,} {name}" for key, name in named if count_in(totals, key)) or "from nobody"
    )


def _row(value: Any) -> Row:
    return value if isinstance(value, dict) else {}


# Facts in words.


def _count_in_words(count: Any) -> str:
    return shards_in_words(count) if isinstance(count, int) and count else ""


def _brought_back_in_words(workers: Any) -> str:
    return brought_back_by(workers) if isinstance(workers, list) and workers else ""


def _size_in_words(count: Any) -> str:
    return tables.size(count) if isinstance(count, int) and count > 0 else ""


CLAUSES: Mapping[str, tuple[str, ...]] = {
    "DatasetDefined": ("the workers train with {dataset}",),
    "TransfersPlanned": ("attempt {attempt}", ": {totals}"),
    "TransfersCompleted": (
        "attempt {attempt}: all workers hold their data",
        ", {transfers} came",
        ", {bytes}",
        ", in {took_s}",
        ", and {estimated_s} were estimated",
    ),
    "ShardsLost": (
        "attempt {attempt}: {count} can be had from nobody any more",
        ", such as {shards}",
        " ({reason})",
        "; {last_held_by}",
    ),
    "CopiesDiffer": (
        "attempt {attempt}: the copies of {count} differ",
        ", such as {shards}",
        "; something else than the others have {workers}",
    ),
    "CorruptShardFound": ("{worker_id} has a damaged copy of shard {shard}", ", as {found_by} has found"),
}
"""As those of `forged.cli.forgectl.workers`."""
IN_WORDS: Mapping[str, Callable[[Any], str]] = {
    "dataset": dataset_in_words,
    "totals": totals_in_words,
    "transfers": _count_in_words,
    "count": _count_in_words,
    "last_held_by": _brought_back_in_words,
    "bytes": _size_in_words,
}
"""Fields of these facts that have words of their own; empty where there is nothing to say."""
