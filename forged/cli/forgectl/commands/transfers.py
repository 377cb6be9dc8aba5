"""`forgectl transfers`: the progress of shard transfers.

With `--follow`, a terminal shows one block per attempt, redrawn in place; otherwise each change prints a line.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row, count_in
from forged.cli.forgectl.commands.data import of_job, restart_hint
from forged.cli.forgectl.commands.events import over_restarts
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer, print_json
from forged.cli.forgectl.parser import Options, Parser
from forged.cli.process import EXIT_OK, stop_without_reader
from forged.errors import RequestRefused
from forged.plain_client.connection import PlainConnection

POLL_INTERVAL_S = 0.2
BAR_WIDTH = 24
NAME_WIDTH_MAX = 24
LINES_BESIDE_WORKERS = 2
"""The summary line and the cursor's line."""
PROGRESS = ("attempt", "running", "waiting_for", "planned", "lost", "done", "bytes")
NOT_YET = frozenset({"transfers_none", "job_without_data", "job_unknown"})
"""Refusals that may end while `--follow` waits."""


def fill(transfers: Parser) -> None:
    """Add the arguments."""
    transfers.set_defaults(act=_transfers)
    of_job(transfers)
    transfers.add_argument(
        "--follow", "-f", action="store_true", help="update until Ctrl-C, also across daemon restarts"
    )


def _transfers(options: Options) -> int:
    if options.follow:
        return _follow(options)
    with DaemonConnection(options) as daemon:
        view = answers.one(daemon, "ShowTransfers", job=options.job)
    answer(options, view, lambda: print("\n".join(_block(view))))
    return EXIT_OK


def _follow(options: Options) -> int:
    in_place = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not options.json
    screen = _Screen()
    printed: list[Any] = []
    for view in over_restarts(options, lambda daemon: _poll(daemon, options.job)):
        progress = [view.get(key) for key in PROGRESS]
        if in_place:
            screen.draw(view)
        elif progress != printed:
            print_json(view) if options.json else print(line(view))
        printed = progress
        sys.stdout.flush()
    return EXIT_OK


def _poll(daemon: PlainConnection, job: str) -> Iterator[Row]:
    while True:
        try:
            yield answers.one(daemon, "ShowTransfers", job=job)
        except RequestRefused as refusal:
            if refusal.code not in NOT_YET:
                raise
        stop_without_reader()
        time.sleep(POLL_INTERVAL_S)


class _Screen:
    """The block of terminal lines that shows an attempt."""

    def __init__(self) -> None:
        self._attempt: Any = None
        self._height = 0

    def draw(self, view: Row) -> None:
        """Draw the block, over the previous one if it showed the same attempt."""
        size = shutil.get_terminal_size()
        lines = [text[: size.columns - 1] for text in _block(view, max(1, size.lines - LINES_BESIDE_WORKERS))]
        if view.get("attempt") == self._attempt and self._height:
            print(f"\x1b[{self._height}A\x1b[J", end="")
        print("\n".join(lines))
        self._attempt, self._height = view.get("attempt"), len(lines)


def under_way(daemon: PlainConnection, job: str, training: Row) -> Row:
    """The transfers of the rescale in progress; empty if there are none."""
    rescale = training.get("rescale")
    if not isinstance(rescale, dict):
        return {}
    view = answers.one_unless(daemon, NOT_YET | {"request_unknown"}, "ShowTransfers", job=job)
    return view if _runs(view) and view.get("attempt") == rescale.get("attempt") else {}


def line(view: Row) -> str:
    """The progress in one line."""
    workers = [one for one in _workers(view) if count_in(one, "transfers")]
    if not _runs(view) or not workers:
        return summary(view)
    shown = ", ".join(f"{_name(one)} {_share(one, 'transfers')}" for one in workers[: tables.NAMES_MAX])
    more = "" if len(workers) <= tables.NAMES_MAX else f" and {len(workers) - tables.NAMES_MAX:,} more"
    return f"{summary(view)}: {shown}{more}"


def _block(view: Row, workers_max: int = sys.maxsize) -> list[str]:
    """The summary line and a line for each worker."""
    workers = _workers(view)
    shown = workers[:workers_max] if len(workers) <= workers_max else workers[: workers_max - 1]
    width = min(NAME_WIDTH_MAX, max((len(_name(one)) for one in shown), default=0))
    lines = [summary(view), *(_worker(one, width) for one in shown)]
    return lines if len(shown) == len(workers) else [*lines, f"  and {len(workers) - len(shown):,} more workers"]


def _workers(view: Row) -> Sequence[Row]:
    """The workers with their transfers; empty before the transfers are planned."""
    return answers.rows_in(view, "workers") if _is_planned(view) else []


def _is_planned(view: Row) -> bool:
    is_settled = view.get("planned", True) or not _runs(view)
    return bool(is_settled and not (answers.list_in(view, "waiting_for") or count_in(view, "lost")))


def _worker(worker: Row, width: int) -> str:
    name, done, transfers = _name(worker), count_in(worker, "done"), count_in(worker, "transfers")
    if not transfers:
        return f"  {name:<{width}}  has all its shards"
    part = 1.0 if worker.get("finished") else done / transfers
    counted, moved = f"{_share(worker, 'transfers'):>9}", f"{tables.size(count_in(worker, 'bytes')):>8}"
    return f"  {name:<{width}}  {tables.bar(part, BAR_WIDTH)}  {counted}  {moved}".rstrip()


def summary(view: Row) -> str:
    """The progress of all workers together, in one line."""
    totals = view.get("totals")
    totals = totals if isinstance(totals, dict) else {}
    begin = f"attempt {tables.field('', view.get('attempt'))}"
    missing = answers.list_in(view, "waiting_for")
    if view.get("aborted"):
        lost = count_in(view, "lost")
        return f"{begin}: {f'no worker has {_lost(view, lost)}; ' if lost else ''}the job was aborted"
    if missing:
        return f"{begin}: waiting for {tables.names(missing)} to report the shards they hold"
    if lost := count_in(view, "lost"):
        by = answers.list_in(view, "last_held_by")
        fix = f"; {restart_hint(by)}" if by else ""
        return f"{begin}: no worker has {_lost(view, lost)}; waiting for a worker that has them{fix}"
    if not _is_planned(view):
        return f"{begin}: planning transfers"
    done, moved, elapsed_s = count_in(view, "done"), count_in(view, "bytes"), _seconds(view, "elapsed_s")
    estimated_s = _seconds(totals, "estimated_s")
    if not _runs(view):
        took = [tables.duration(elapsed_s)] + [f"estimated {tables.duration(estimated_s)}"] * (estimated_s > 0)
        moving = f"{tables.counted(done, 'shard')} transferred, {tables.size(moved)}, in {'; '.join(took)}"
        return f"{begin}: all workers hold their data{f'; {moving}' if done else ''}"
    said = f"{begin}: {done:,} of {tables.counted(count_in(totals, 'transfers'), 'shard')}, {tables.size(moved)}"
    if moved and elapsed_s:
        said += f", {tables.size(int(moved / elapsed_s))}/s"
    estimate = f" of an estimated {tables.duration(estimated_s)}" if estimated_s else ""
    return f"{said}, after {tables.duration(elapsed_s)}{estimate}"


def _lost(view: Row, count: int) -> str:
    named = tables.field("", answers.list_in(view, "lost_shards")[: tables.NAMES_MAX])
    because = f" ({view['lost_because']})" if view.get("lost_because") else ""
    return f"{tables.counted(count, 'shard')}, such as {named}{because}"


def _runs(view: Row) -> bool:
    return bool(view.get("running"))


def _name(worker: Row) -> str:
    return tables.field("", worker.get("worker_id"))


def _share(view: Row, key: str) -> str:
    return f"{count_in(view, 'done'):,}/{count_in(view, key):,}"


def _seconds(view: Row, key: str) -> float:
    number = view.get(key)
    return number if isinstance(number, (int, float)) else 0.0
