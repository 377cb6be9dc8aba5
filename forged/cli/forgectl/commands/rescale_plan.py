"""`forgectl plan`: what a rescale would change."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import RANK_NONE, Row, known, rank
from forged.cli.forgectl.commands import data
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options, Parser
from forged.cli.process import EXIT_OK

SIZE_DIGITS_MAX = 9
FUTURE_WORKERS_SHOWN_MAX = 8
"""Longer runs of workers that have not joined yet are shown by their first and last worker."""
_FUTURE_WORKER = re.compile(r"new-([0-9]{1,9})")


def fill(plan: Parser) -> None:
    """Add the arguments."""
    plan.set_defaults(act=_plan)
    plan.add_argument("--job", required=True, metavar="JOB", help="the job")
    plan.add_argument("--workers", required=True, type=_size, metavar="N", help="the number of workers after it")


def _size(text: str) -> int:
    if not text.isdecimal() or len(text) > SIZE_DIGITS_MAX or not int(text):
        raise argparse.ArgumentTypeError(f"the number of workers must be an integer >= 1, got {text!r}")
    return int(text)


def _plan(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        plan = answers.one(daemon, "PlanRescale", job=options.job, workers=options.workers)
        totals = data.planned_transfers(daemon, options.job, _target(plan), answers.list_in(plan, "gone"))
        answer(options, plan | ({"data": totals} if totals else {}), lambda: _print_plan(plan, totals))
    return EXIT_OK


def _target(plan: Row) -> list[Any]:
    """The ids of the planned world, by rank."""
    ranks = {one.get("new_rank"): one.get("id") for one in answers.rows_in(plan, "workers")}
    return [ranks[rank] for rank in sorted(rank for rank in ranks if isinstance(rank, int) and rank > RANK_NONE)]


def _print_plan(plan: Row, totals: Row) -> None:
    tables.pairs(
        {
            "workers": _change(plan, "world_size"),
            "learning_rate": _change(plan, "learning_rate"),
            "global_batch_size": _change(plan, "global_batch_size"),
            "ranks_changed": plan.get("ranks_changed"),
        }
    )
    tables.notes(plan)
    print()
    _print_ranks([one for one in answers.rows_in(plan, "workers") if one.get("rank") != one.get("new_rank")])
    data.print_planned_transfers(totals)


def _change(plan: Row, key: str) -> str:
    old, new = (tables.field("", known(key, value)) for value in (plan.get(key), plan.get(f"new_{key}")))
    return old if old == new else f"{old} -> {new}"


def _print_ranks(workers: Iterable[Row]) -> None:
    runs = [list(run) for _, run in groupby(workers, _series)]
    rows = [
        {"worker": one.get("id"), "rank": rank(one.get("rank")), "new_rank": rank(one.get("new_rank"))}
        for run in runs
        for one in run
        if len(run) <= FUTURE_WORKERS_SHOWN_MAX
    ]
    many = [run for run in runs if len(run) > FUTURE_WORKERS_SHOWN_MAX]
    if rows or not many:
        tables.table(rows, ("worker", "rank", "new_rank"), "no rank changes")
    for first, *_, last in many:
        print(f"{first['id']} … {last['id']} get ranks {first['new_rank']} … {last['new_rank']}")


def _series(worker: Row) -> Any:
    """Equal for future workers with consecutive ranks; distinct for every other worker."""
    rank, number = worker.get("new_rank"), _FUTURE_WORKER.fullmatch(f"{worker.get('id')}")
    return int(number[1]) - rank if number and isinstance(rank, int) else f"{worker.get('id')}"
