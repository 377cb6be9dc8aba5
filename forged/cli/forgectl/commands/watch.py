"""`forgectl jobs watch`: a job's training, live.

On a terminal the picture is redrawn; elsewhere there is a line for each interval. It ends when the job is over, and
goes on over restarts of the daemon.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import UNTOLD, Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import print_json
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_OK, stop_without_reader
from forged.errors import Unavailable
from forged.plain_client.connection import Event, PlainConnection

INTERVAL_S = 1.0
LINE_INTERVAL_S = 5.0
"""The default where the output is no terminal."""
FACTS_SHOWN = 5
FACTS_LOOKED_AT = 500
"""Facts of all jobs before the newest one, of which those of the job are shown first."""
CLEAR, HOME = "\x1b[J", "\x1b[H"
BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40
VALUES_SHOWN = 8
LATE_S = 5.0
"""A worker that has reported nothing for longer is marked."""
COLUMNS = ("rank", "worker", "step", "step_time", "waiting", "problem")
YIELDING = ("step",)
OVER = ("completed", "aborted")
LOSSES = (
    ("rescale_s", "rescales"),
    ("standstill_s", "standstills without the daemon"),
    ("aborted_s", "aborted steps"),
    ("waiting_s", "waiting for slow ranks"),
    ("checkpoint_s", "saving checkpoints"),
    ("workers_s", "waiting for workers"),
    ("paused_s", "paused"),
    ("script_s", "the script between steps"),
)
"""The fields of what time was spent on, but committed steps, and how they are called."""


def watch(options: Options) -> int:
    """Show a job's training until it is over, or once."""
    facts = LastFacts(options.name)
    is_live = sys.stdout.isatty() and not (options.once or options.json)
    interval_s = options.interval or (INTERVAL_S if sys.stdout.isatty() else LINE_INTERVAL_S)
    while True:
        try:
            with DaemonConnection(options) as daemon:
                cluster, training = read(daemon, options.name)
                if not options.json:
                    facts.read(daemon)
        except Unavailable as error:
            if options.once:
                raise
            print(f"{HOME if is_live else ''}no connection to the daemon: {error}{CLEAR if is_live else ''}")
        else:
            if is_live:
                # Only now, so that a picture that is too long for the terminal scrolls from its top.
                print(f"{HOME}{CLEAR}", end="")
            _print(options, cluster, training, facts.shown, is_whole=is_live or options.once)
            if options.once or cluster.get("phase") in OVER:
                return EXIT_OK
        sys.stdout.flush()
        stop_without_reader()
        time.sleep(interval_s)


def read(daemon: PlainConnection, job: str) -> tuple[Row, Row]:
    """The state of a job's training and its metrics; empty before the first worker joins."""
    cluster = answers.one_unless(daemon, UNTOLD, "ShowCluster", job=job)
    return cluster, answers.one(daemon, "ReadTraining", job=job)


class LastFacts:
    """The last facts of a job."""

    def __init__(self, job: str) -> None:
        self.shown: deque[Event] = deque(maxlen=FACTS_SHOWN)
        self._job = job
        self._history = ""
        self._position = 0

    def read(self, daemon: PlainConnection) -> None:
        """Read the facts up to now."""
        if daemon.history != self._history:
            self.shown.clear()
            self._history, self._position = daemon.history, max(0, daemon.latest - FACTS_LOOKED_AT)
        if daemon.latest <= self._position:
            return
        for position, event in daemon.facts(self._position, [], [self._job], until=daemon.latest):
            self._position = max(self._position, position)
            if event is not None and "gap" not in event:
                self.shown.append(event)


def _print(options: Options, cluster: Row, training: Row, facts: Sequence[Event], *, is_whole: bool) -> None:
    if options.json:
        print_json({"training": cluster, "metrics": training})
    elif is_whole:
        _print_picture(options.name, cluster, training, facts)
    else:
        print(line(options.name, cluster, training))


def line(job: str, cluster: Row, training: Row) -> str:
    """A job's training in one line."""
    slowest = [f"slowest {tables.field('', row.get('worker_id'))}" for row in _workers(training) if row["is_slowest"]]
    share = _number(answers.map_in(training, "goodput").get("goodput"))
    goodput = [] if share is None else [f"goodput {percent(share)}"]
    stall = [tables.field("", cluster["stall_report"])] if cluster.get("stall_report") else []
    head = f"{tables.field('', job)} {_state(cluster, training)}"
    return ", ".join([head, *_rates(training), *slowest, *goodput, *stall])


def _print_picture(job: str, cluster: Row, training: Row, facts: Sequence[Event]) -> None:
    from forged.cli.forgectl.fact_sentences import in_words

    print(f"{tables.paint(tables.field('', job), tables.BOLD)}  {_state(cluster, training)}")
    if cluster.get("stall_report"):
        tables.print_wrapped(tables.paint(f"  {tables.field('', cluster['stall_report'])}", tables.YELLOW), 2)
    if rates := _rates(training):
        tables.print_wrapped(f"  {'   '.join(rates)}", 2)
    if curve := _curve(training):
        print(f"  loss {curve}")
    print()
    rows = [_row(worker) for worker in _workers(training)]
    tables.table(rows, COLUMNS, "  no worker has reported yet", yielding=YIELDING, kept="worker")
    if left_out := answers.count_in(training, "workers_left_out"):
        print(f"  and {tables.counted(left_out, 'more worker')}")
    goodput = answers.map_in(training, "goodput")
    if goodput:
        print()
        print_goodput(goodput)
    if facts:
        print()
        for event in facts:
            tables.event(event, in_words)


def _state(cluster: Row, training: Row) -> str:
    """The phase, the world and the step."""
    if not cluster:
        return "no worker has joined"
    paused = ", paused" if cluster.get("paused") and cluster.get("phase") not in OVER else ""
    size = cluster.get("world_size")
    phase, generation = (tables.field("", cluster.get(key)) for key in ("phase", "generation"))
    world = tables.counted(size, "worker") if isinstance(size, int) else tables.NONE
    step = max(answers.count_in(training, "step"), answers.count_in(answers.map_in(cluster, "state"), "current_step"))
    return f"{phase}{paused}, generation {generation}, {world}, step {step:,}"


def _rates(training: Row) -> list[str]:
    """Steps and samples a second, and the logged values, those that are not finite marked."""
    found = [
        f"{value:.4g} {name}"
        for name, key in (("steps/s", "steps_per_s"), ("samples/s", "samples_per_s"))
        if (value := _number(training.get(key))) is not None
    ]
    values = answers.map_in(training, "values")
    # The loss is what most want to see first.
    names = sorted(values, key=lambda name: (name != "loss", f"{name}"))
    for name in names[:VALUES_SHOWN]:
        value = _number(values[name])
        if value is not None:
            text = f"{tables.field('', name)} {value:.4g}"
            found.append(text if value - value == 0.0 else tables.paint(text, tables.RED))
    if len(names) > VALUES_SHOWN:
        found.append(f"{len(names) - VALUES_SHOWN} more values")
    return found


def _curve(training: Row) -> str:
    """The loss of the last minutes; empty if it is not logged."""
    logged = [_number(answers.map_in(sample, "values").get("loss")) for sample in answers.rows_in(training, "history")]
    values = [value for value in logged if value is not None and value - value == 0.0]
    if len(values) < 2:
        return ""
    every = -(-len(values) // CURVE_WIDTH)
    means = [sum(part) / len(part) for part in (values[at : at + every] for at in range(0, len(values), every))]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in means)


def _workers(training: Row) -> Iterator[dict[str, Any]]:
    for worker in answers.rows_in(training, "workers"):
        yield {**worker, "is_slowest": worker.get("is_slowest") is True}


def _row(worker: Row) -> Row:
    age_s = _number(worker.get("age_s")) or 0.0
    notes = ["slowest"] if worker["is_slowest"] else []
    notes += [f"no report for {tables.duration(age_s)}"] if age_s > LATE_S else []
    return {
        "rank": answers.rank(worker.get("rank")),
        "worker": worker.get("worker_id"),
        "step": worker.get("step"),
        "step_time": _duration(worker.get("step_time_s")),
        "waiting": _duration(worker.get("waiting_time_s")),
        "problem": ", ".join(notes),
    }


def print_goodput(goodput: Row) -> None:
    """The share of time in committed steps, and what the rest was spent on, most first."""
    wall_s, share = _number(goodput.get("wall_s")) or 0.0, _number(goodput.get("goodput"))
    if share is None or wall_s <= 0.0:
        return
    spent = answers.map_in(goodput, "spent")
    lost = [(_number(spent.get(key)) or 0.0, name) for key, name in LOSSES]
    lost.append((_number(goodput.get("unknown_s")) or 0.0, "not known"))
    parts = [
        f"{name} {percent(seconds / wall_s)} ({tables.duration(seconds)})"
        for seconds, name in sorted(lost, key=lambda each: -each[0])
        if seconds / wall_s >= 0.0005
    ]
    said = f"goodput {tables.paint(percent(share), tables.BOLD)} of {tables.duration(wall_s)}"
    tables.print_wrapped(f"{said}{'; lost: ' if parts else ''}{', '.join(parts)}", 2)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _duration(value: Any) -> str:
    seconds = _number(value)
    return tables.NONE if seconds is None else tables.duration(seconds)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
