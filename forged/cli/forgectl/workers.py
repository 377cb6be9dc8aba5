"""`forgectl workers` and `forgectl plan`, and what jobs, facts and completion have to say about elastic training.

Law: a worker is named by its id; the job may be left out where only one has such a worker. What is said of a fact in
words leaves out nothing that the fact says, but for what follows from the rest.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from forged.cli.forgectl import answers, data, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import Connection
from forged.cli.forgectl.output import answer, print_json
from forged.cli.forgectl.parser import Options, Parser, positional, verb, verbs_of
from forged.cli.process import EXIT_OK, heed_reader
from forged.errors import RequestRefused
from forged.plain_client.connection import Wire

COLUMNS = ("job", "id", "rank", "status", "step", "gen", "heard_s", "address", "trouble")
YIELDING = ("address", "gen", "heard_s", "step")
"""What a narrow terminal shows less of, or nothing, before anything else is cut; an id can be copied for `drain`."""
INDENT = 2
"""How far in the further lines of a sentence begin that is too long for a terminal."""
WATCH_INTERVAL_S = 0.2
SIZE_DIGITS_MAX = 9
STRANGERS_SHOWN_MAX = 8
"""So many in a row who have yet to come are shown one by one."""
RANK_NONE = -1
_STRANGER = re.compile(r"new-([0-9]{1,9})")
UNTRAINED = frozenset({"job_untrained", "job_unknown"})
ABSENT = UNTRAINED | {"worker_unknown"}
UNTOLD = UNTRAINED | {"request_unknown"}


# Commands.


def fill(workers: Parser) -> None:
    """What can be done with workers."""
    verbs = verbs_of(workers, _list)
    workers.set_defaults(jobs=[], job=None)
    listing = verb(verbs, "ls", _list, "the workers of all jobs, or of some", aliases=["list"])
    for parser in (workers, listing):
        parser.add_argument(
            "--job",
            action="append",
            dest="jobs",
            default=argparse.SUPPRESS,
            metavar="JOB",
            help="only of this job; repeatable",
        )
    _about_one(verb(verbs, "show", _show, "one worker"))
    _for_a_reason(_about_one(verb(verbs, "drain", _drain, "have a worker finish its step and go")))
    _for_a_reason(_about_one(verb(verbs, "evict", _evict, "count a worker as dead")))


def fill_jobs(verbs: Any) -> None:
    """What can be done with a job's training."""
    for name, act, text in _JOB_VERBS:
        _for_a_reason(_about_job(verb(verbs, name, act, text)))
    _about_job(verb(verbs, "watch", _watch, "follow a rescale that is under way until it is over"))


def fill_plan(plan: Parser) -> None:
    """What a rescale would do."""
    plan.set_defaults(act=_plan)
    plan.add_argument("--job", required=True, metavar="JOB", help="whose workers")
    plan.add_argument("--workers", required=True, type=_size, metavar="N", help="how many there would be")


def _about_one(parser: Parser) -> Parser:
    whose = "whose worker; needed where several jobs have one of that id"
    parser.add_argument("--job", default=argparse.SUPPRESS, metavar="JOB", help=whose)
    positional(parser, "worker", "WORKER")
    return parser


def _about_job(parser: Parser) -> Parser:
    positional(parser, "name", "JOB")
    return parser


def _for_a_reason(parser: Parser) -> None:
    parser.add_argument("--reason", metavar="TEXT", help="why, for the record")


def _size(text: str) -> int:
    if not text.isdecimal() or len(text) > SIZE_DIGITS_MAX or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers; give 1 or more")
    return int(text)


def _list(options: Options) -> int:
    with Connection(options) as wire:
        jobs = dict.fromkeys(options.jobs)
        workers = [row for job in jobs for row in _required(wire, job)] if jobs else list(listed(wire, _jobs(wire)))
    rows = [_readable(worker) for worker in workers]
    columns = COLUMNS if any(row["trouble"] for row in rows) else COLUMNS[:-1]
    answer(
        options, {"workers": workers}, lambda: tables.table(rows, columns, "no workers", yielding=YIELDING, kept="id")
    )
    return EXIT_OK


def _show(options: Options) -> int:
    with Connection(options) as wire:
        _, worker = _find(wire, options)
    answer(options, worker, lambda: tables.pairs(worker | {"rank": _rank(worker.get("rank"))}))
    return EXIT_OK


def _drain(options: Options) -> int:
    return _dismiss(options, "DrainWorker", "is to finish its step and go")


def _evict(options: Options) -> int:
    return _dismiss(options, "EvictWorker", "counts as dead")


def _dismiss(options: Options, method: str, done: str) -> int:
    worker = options.worker
    with Connection(options) as wire:
        job = _named_job(options) or _find(wire, options)[0]
        reply = answers.one(wire, method, job=job, worker_id=worker, **_reason(options))
        answer(
            options, {"job": job, "id": worker, **reply}, lambda: _show_dismissed(f"{worker} of {job} {done}", reply)
        )
    return EXIT_OK


def _show_dismissed(done: str, reply: Row) -> None:
    print(tables.field("", done))
    _show_remarks(reply)


def _named_job(options: Options) -> str | None:
    """The job that is named, before the verb or behind it."""
    return options.job or next(reversed(options.jobs), None)


def _pause(options: Options) -> int:
    return _steer(options, "PauseJob", _paused)


def _resume(options: Options) -> int:
    return _steer(options, "ResumeJob", _resumed)


def _abort(options: Options) -> int:
    return _steer(options, "AbortJob", _aborted)


def _rescale(options: Options) -> int:
    return _steer(options, "RescaleJob", _rescaled)


_JOB_VERBS = (
    ("pause", _pause, "let a job's training rest behind its step"),
    ("resume", _resume, "let a job's training go on"),
    ("abort", _abort, "give a job's training up; its workers end"),
    ("rescale", _rescale, "start a rescale now, with whoever is there"),
)


def _steer(options: Options, method: str, say: Callable[[Row], str]) -> int:
    with Connection(options) as wire:
        reply = answers.one(wire, method, job=options.name, **_reason(options))
        answer(options, reply, lambda: tables.print_wrapped(f"{tables.field('', options.name)}: {say(reply)}", INDENT))
    return EXIT_OK


def _paused(reply: Row) -> str:
    return "training is to rest behind its step" if _has_changed(reply) else f"it was paused already{_because(reply)}"


def _resumed(reply: Row) -> str:
    standing = _standing(reply)
    if not _has_changed(reply):
        return f"it was not paused{standing}"
    return f"it is not paused any more{standing}" if standing else "training goes on"


def _aborted(reply: Row) -> str:
    if not _has_changed(reply):
        return f"it was aborted already{_because(reply)}"
    return "training is given up, and its workers end; how far it was stays on record"


def _rescaled(reply: Row) -> str:
    if not _has_changed(reply):
        return f"nothing begins yet{_standing(reply)}"
    return "a new world is to be agreed on; `forgectl jobs watch` follows it"


def _has_changed(reply: Row) -> bool:
    # An older daemon does not say.
    return reply.get("changed") is not False


def _because(reply: Row) -> str:
    return f": {tables.field('', reply['reason'])}" if reply.get("reason") else ""


def _reason(options: Options) -> Row:
    return {} if options.reason is None else {"reason": options.reason}


def _watch(options: Options) -> int:
    told = ""
    with Connection(options) as wire:
        while True:
            cluster = answers.one(wire, "ShowCluster", job=options.name)
            told, before = _progress(cluster), told
            if told != before:
                print_json(cluster) if options.json else tables.print_wrapped(f"{told}{_standing(cluster)}", INDENT)
                sys.stdout.flush()
            if not _is_rescaling(cluster):
                return EXIT_OK
            heed_reader()
            time.sleep(WATCH_INTERVAL_S)


def _plan(options: Options) -> int:
    with Connection(options) as wire:
        plan = answers.one(wire, "PlanRescale", job=options.job, workers=options.workers)
        totals = data.travelling(wire, options.job, _target(plan), answers.list_in(plan, "gone"))
        answer(options, plan | ({"data": totals} if totals else {}), lambda: _show_plan(plan, totals))
    return EXIT_OK


# What is asked.


def listed(wire: Wire, jobs: Iterable[str], after: str = "") -> Iterator[Row]:
    """The workers of these jobs, of each those behind that id; a job that nobody has joined has none."""
    for job in jobs:
        try:
            yield from answers.pages(wire, "ListWorkers", field="workers", key="id", after=after, job=job)
        except RequestRefused as refusal:
            _pass_over(refusal, UNTRAINED)


def training(wire: Wire, job: str) -> Row:
    """Where a job's training is; nothing where nobody has joined it, or the daemon knows no training."""
    try:
        return answers.one(wire, "ShowCluster", job=job)
    except RequestRefused as refusal:
        return _pass_over(refusal, UNTOLD)


def phases(wire: Wire) -> dict[str, Row]:
    """The phases of all jobs that a worker has joined, and which of them rest; none where the daemon cannot tell."""
    try:
        clusters = answers.pages(wire, "ListClusters", field="clusters", key="job")
    except RequestRefused as refusal:
        return _pass_over(refusal, UNTOLD)
    return {
        f"{cluster.get('job')}": {"phase": cluster.get("phase")} | ({"paused": True} if cluster.get("paused") else {})
        for cluster in clusters
    }


def phase_in_words(job: Row) -> Any:
    """What a job's training does, or that it rests."""
    is_over = job.get("phase") in ("completed", "aborted")
    return "paused" if job.get("paused") and not is_over else job.get("phase")


def _jobs(wire: Wire) -> list[str]:
    return [f"{job.get('name')}" for job in answers.pages(wire, "ListJobs", field="jobs", key="name")]


def _required(wire: Wire, job: str) -> list[Row]:
    """The workers of a job that has to be there."""
    workers = list(listed(wire, [job]))
    if not workers:
        answers.one(wire, "ShowJob", job=job)
    return workers


def _find(wire: Wire, options: Options) -> tuple[str, Row]:
    """The job and the worker that are meant."""
    worker, named = options.worker, _named_job(options)
    if named:
        return named, answers.one(wire, "ShowWorker", job=named, worker_id=worker)
    found = [(job, row) for job in _jobs(wire) if (row := _one(wire, job, worker))]
    if not found:
        raise RequestRefused("worker_unknown", f"no job has a worker {worker!r}", "see `forgectl workers ls`")
    if len(found) > 1:
        jobs = tables.names([job for job, _ in found])
        raise RequestRefused("worker_ambiguous", f"several jobs have a worker {worker!r}: {jobs}", "name one by --job")
    return found[0]


def _one(wire: Wire, job: str, worker: str) -> Row:
    try:
        return answers.one(wire, "ShowWorker", job=job, worker_id=worker)
    except RequestRefused as refusal:
        return _pass_over(refusal, ABSENT)


def _pass_over(refusal: RequestRefused, codes: frozenset[str]) -> Row:
    if refusal.code not in codes:
        raise refusal
    return {}


# How it looks.


def show_training(cluster: Row) -> None:
    """Where a job's training is, and below it the rescale that is under way."""
    whole = {key: value for key, value in cluster.items() if key not in _SHOWN_APART}
    # Whoever asks wants to know first whether it gets on.
    whole = {"phase": whole.pop("phase", None), "stall_report": cluster.get("stall_report") or None, **whole}
    state = cluster.get("state")
    if isinstance(state, dict):
        whole |= {name: _known(key, state.get(key)) for key, name in _STATE_NAMES.items()}
    print()
    tables.pairs(whole)
    rescale = cluster.get("rescale")
    if isinstance(rescale, dict):
        print("\na rescale is under way:")
        tables.pairs(rescale)


_SHOWN_APART = frozenset({"job", "state", "rescale", "stall_report"})
_UNKNOWN_AT_0 = frozenset({"learning_rate", "global_batch_size", "state_timestamp"})
_STATE_NAMES = {
    "current_epoch": "epoch",
    "current_step": "step",
    "learning_rate": "learning_rate",
    "global_batch_size": "global_batch_size",
    "state_timestamp": "updated_at",
}


def _readable(worker: Row) -> Row:
    trouble = [
        text
        for text, is_so in (("stalled", worker.get("stalled")), ("no connection", worker.get("connected") is False))
        if is_so
    ]
    return worker | {
        "rank": _rank(worker.get("rank")),
        "gen": worker.get("generation"),
        "heard_s": worker.get("last_heartbeat_age_s"),
        "trouble": ", ".join(trouble),
    }


def _known(key: str, value: Any) -> Any:
    return None if key in _UNKNOWN_AT_0 and not value else value


def _rank(rank: Any) -> Any:
    return None if rank == RANK_NONE else rank


def _is_rescaling(cluster: Row) -> bool:
    # Between two attempts, as behind a restart of the daemon, there is the phase alone.
    return isinstance(cluster.get("rescale"), dict) or cluster.get("phase") == "rescaling"


def _progress(cluster: Row) -> str:
    """A rescale in one line, which changes when it has come further."""
    rescale = cluster.get("rescale")
    if isinstance(rescale, dict):
        missing = rescale.get("waiting_for")
        waiting = f"waits for {tables.names(missing)}" if isinstance(missing, list) and missing else "waits for nobody"
        attempt, stage = (tables.field("", rescale.get(key)) for key in ("attempt", "stage"))
        return f"attempt {attempt}, {stage}: {waiting}{_bracketed(rescale.get('reason'))}"
    if _is_rescaling(cluster):
        return "rescaling: between two attempts"
    state = cluster.get("state")
    step = state.get("current_step") if isinstance(state, dict) else None
    phase, generation = (tables.field("", cluster.get(key)) for key in ("phase", "generation"))
    world = _spelt("world_size", cluster.get("world_size"))
    about = f"generation {generation}, {world}, step {tables.field('', step)}"
    return f"{phase}: {about}{_bracketed(cluster.get('reason'))}"


def _standing(cluster: Row) -> str:
    """What stands still; a rescale says itself what it waits for."""
    standing = cluster.get("stall_report")
    return "" if not standing or isinstance(cluster.get("rescale"), dict) else f"; {tables.field('', standing)}"


def _bracketed(reason: Any) -> str:
    return f" ({tables.field('', reason)})" if reason else ""


def _target(plan: Row) -> list[Any]:
    """Who would be there, by rank."""
    ranks = {one.get("new_rank"): one.get("id") for one in answers.rows_in(plan, "workers")}
    return [ranks[rank] for rank in sorted(rank for rank in ranks if isinstance(rank, int) and rank > RANK_NONE)]


def _show_plan(plan: Row, totals: Row) -> None:
    tables.pairs(
        {
            "workers": _change(plan, "world_size"),
            "learning_rate": _change(plan, "learning_rate"),
            "global_batch_size": _change(plan, "global_batch_size"),
            "moves": plan.get("moves"),
        }
    )
    _show_remarks(plan)
    print()
    _show_ranks([one for one in answers.rows_in(plan, "workers") if one.get("rank") != one.get("new_rank")])
    data.show_travelling(totals)


def _show_ranks(workers: Iterable[Row]) -> None:
    """Who changes its rank; of many in a row who have yet to come, the first and the last."""
    runs = [list(run) for _, run in groupby(workers, _series)]
    rows = [
        {"worker": one.get("id"), "rank": _rank(one.get("rank")), "new_rank": _rank(one.get("new_rank"))}
        for run in runs
        for one in run
        if len(run) <= STRANGERS_SHOWN_MAX
    ]
    many = [run for run in runs if len(run) > STRANGERS_SHOWN_MAX]
    if rows or not many:
        tables.table(rows, ("worker", "rank", "new_rank"), "no rank changes")
    for first, *_, last in many:
        print(f"{first['id']} … {last['id']} get ranks {first['new_rank']} … {last['new_rank']}")


def _series(worker: Row) -> Any:
    """The same for those who have yet to come and get ranks in a row; for everybody else its name."""
    rank, number = worker.get("new_rank"), _STRANGER.fullmatch(f"{worker.get('id')}")
    return int(number[1]) - rank if number and isinstance(rank, int) else f"{worker.get('id')}"


def _show_remarks(said: Row) -> None:
    for remark in answers.list_in(said, "remarks"):
        tables.print_wrapped(f"note: {tables.field('', remark)}", INDENT)


def _change(plan: Row, key: str) -> str:
    old, new = (tables.field("", _known(key, value)) for value in (plan.get(key), plan.get(f"new_{key}")))
    return old if old == new else f"{old} -> {new}"


# Facts in words.

_CLAUSES: Mapping[str, tuple[str, ...]] = {
    "WorkerJoined": ("{worker} waits for a rank",),
    "WorkerReturned": ("{worker_id} is back", " after {after_s}"),
    "WorkerLeft": ("{worker_id} left", ": {reason}"),
    "WorkerFailed": ("{worker_id} failed", " with rank {rank}", ": {reason}"),
    "WorkerDraining": ("{worker_id} is to finish its step and go", ": {reason}"),
    "WorkerStalled": ("{worker_id} lives and makes no progress", " for {for_s}", " behind step {step}"),
    "WorkerRecovered": ("{worker_id} makes progress again", " behind step {step}"),
    "WorkerLost": ("{worker_id} is out of reach", ": {reason}", "; it has {grace_s} to come back"),
    "RescaleStarted": (
        "attempt {attempt}",
        " at a world of {world_size}",
        " ({type})",
        " {in_background}",
        ", with {added}",
        ", without {removed}",
        ", letting {leaving} go",
        ": {reason}",
    ),
    "RescaleSynchronising": (
        "attempt {attempt}: all have stopped",
        " behind step {step}",
        "; {source} gives its state to {behind}",
    ),
    "ProgressLost": (
        "what was committed beyond step {step} is lost",
        ", which is {steps} steps",
        ": {reason}",
    ),
    "RescaleCompleted": (
        "attempt {attempt} succeeded",
        " after {took_s}",
        ": a world of {delta}",
        ", with {added}",
        ", without {removed}",
        ", goes on behind step {step}",
        " of epoch {epoch}",
        ", learning rate {learning_rate}",
        ", batch {global_batch_size}",
        ": {reason}",
    ),
    "RescaleAborted": ("attempt {attempt} is given up", ": {reason}"),
    "JobWaiting": ("training waits: {workers} left", ", {needed} needed"),
    "JobPaused": ("training is to rest", ": {reason}"),
    "JobResumed": ("training goes on", ": {reason}"),
    "JobCompleted": ("training is done", " behind step {step}"),
    "JobAborted": ("training is given up", " behind step {step}", ": {reason}"),
    **data.CLAUSES,
}
"""Clause by clause; one is left out where a field of it is missing or empty, and all where that is the first."""
_FIELD = re.compile(r"\{(\w+)\}")
_FOLLOWS = frozenset({"type"})
"""What nobody misses, because it follows from the rest."""
_COUNTS_OF_WORKERS = frozenset({"world_size", "behind", "workers"})


def in_words(kind: Any, fact: Row) -> str | None:
    """A fact about training as a sentence; None where it is about something else, or is told as nobody knows it."""
    clauses = _CLAUSES.get(kind) if isinstance(kind, str) else None
    if clauses is None:
        return None
    if fact.get("type") == "replace" and not (fact.get("added") or fact.get("removed")):
        # Nobody takes anybody's place.
        fact = {**fact, "type": None}
    first, *others = (_clause(clause, fact) for clause in clauses)
    if not first:
        return None
    known = _FOLLOWS.union(*(_FIELD.findall(clause) for clause in clauses))
    more = tables.fields({key: value for key, value in fact.items() if key not in known})
    return "".join([first, *others, f" {more}" if more else ""])


def _clause(clause: str, fact: Row) -> str:
    texts = {name: _spelt(name, fact.get(name)) for name in _FIELD.findall(clause)}
    if any(text in ("", tables.NONE) for text in texts.values()):
        return ""
    return _FIELD.sub(lambda found: texts[found[1]], clause)


def _spelt(name: str, value: Any) -> str:
    """A field's value as it stands in a sentence; empty where there is nothing to say."""
    if name == "delta":
        name, value = "world_size", _world_size(value)
    if name == "rank" and value == RANK_NONE:
        return ""
    if name == "in_background":
        return "while training goes on" if value is True else ""
    if name in data.IN_WORDS:
        return data.IN_WORDS[name](value)
    if isinstance(value, list):
        return tables.names(value)
    if name == "behind" and value == 0:
        return ""
    if name in _COUNTS_OF_WORKERS and isinstance(value, int):
        return f"{value} worker{'' if value == 1 else 's'}"
    text = tables.field(name, _known(name, value))
    return text.replace("_", " ") if name == "type" else text


def _world_size(delta: Any) -> int | None:
    """How many workers a change of the topology leads to.

    A piece of it is a worker who is new, or a run of others: where it begins, and how long it is.
    """
    pieces = delta.get("pieces") if isinstance(delta, dict) else None
    if not isinstance(pieces, list):
        return None
    counts = [piece[1] if isinstance(piece, list) and len(piece) == 2 else 1 for piece in pieces]
    return sum(counts) if all(isinstance(count, int) for count in counts) else None
