"""`forgectl workers`: the workers of all jobs.

A worker is named by its id; the job may be omitted if only one job has a worker of that id.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import UNTRAINED, Row, rank
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options, Parser, add_reason, positional, verb, verbs_of
from forged.cli.process import EXIT_FAILED, EXIT_OK, plain
from forged.errors import RequestRefused
from forged.plain_client.connection import PlainConnection

COLUMNS = ("job", "id", "rank", "group", "status", "step", "gen", "heartbeat_s", "address", "problem")
YIELDING = ("address", "gen", "heartbeat_s", "step")
"""The columns that a narrow terminal cuts or omits first; an id stays whole, so that it can be copied for `drain`."""
ABSENT = UNTRAINED | {"worker_unknown"}


def fill(workers: Parser) -> None:
    """Add the verbs."""
    verbs = verbs_of(workers, _list)
    workers.set_defaults(jobs=[], job=None)
    listing = verb(verbs, "ls", _list, "list the workers of all jobs, or of some", aliases=["list"])
    for parser in (workers, listing):
        parser.add_argument(
            "--job",
            action="append",
            dest="jobs",
            default=argparse.SUPPRESS,
            metavar="JOB",
            help="only this job; repeatable",
        )
    _of_worker(verb(verbs, "show", _show, "show a worker"))
    add_reason(_of_worker(verb(verbs, "drain", _drain, "let a worker finish its current step and leave")))
    add_reason(_of_worker(verb(verbs, "evict", _evict, "treat a worker as failed")))
    _of_worker(verb(verbs, "stack", _stack, "show the Python stacks of a worker's process, also if it hangs"))


def _of_worker(parser: Parser) -> Parser:
    text = "the worker's job; required if several jobs have a worker of this id"
    parser.add_argument("--job", default=argparse.SUPPRESS, metavar="JOB", help=text)
    positional(parser, "worker", "WORKER")
    return parser


def _list(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        jobs = dict.fromkeys(options.jobs)
        named = [row for job in jobs for row in _required(daemon, job)]
        workers = named if jobs else list(listed(daemon, _jobs(daemon)))
    rows = [_readable(worker) for worker in workers]
    optional = {"group", "problem"}
    columns = [name for name in COLUMNS if name not in optional or any(row[name] for row in rows)]
    answer(
        options, {"workers": workers}, lambda: tables.table(rows, columns, "no workers", yielding=YIELDING, kept="id")
    )
    return EXIT_OK


def _readable(worker: Row) -> Row:
    problems = [
        text
        for text, is_so in (("stalled", worker.get("stalled")), ("no connection", worker.get("connected") is False))
        if is_so
    ]
    return worker | {
        "rank": rank(worker.get("rank")),
        "group": f"{worker['group']}/{worker.get('group_rank')}" if worker.get("group") else "",
        "gen": worker.get("generation"),
        "heartbeat_s": worker.get("last_heartbeat_age_s"),
        "problem": ", ".join(problems),
    }


def _show(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        _, worker = _find(daemon, options)
    answer(options, worker, lambda: tables.pairs(worker | {"rank": rank(worker.get("rank"))}))
    return EXIT_OK


def _drain(options: Options) -> int:
    return _remove(options, "DrainWorker", "draining {worker} (job {job}) after its current step")


def _evict(options: Options) -> int:
    return _remove(options, "EvictWorker", "evicted {worker} (job {job})")


def _stack(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        job = _named_job(options) or _find(daemon, options)[0]
        stacks = answers.one(daemon, "ReadStacks", job=job, worker_id=options.worker)
    answer(options, {"job": job, "id": options.worker, **stacks}, lambda: _print_stacks(stacks))
    return EXIT_OK if stacks.get("text") else EXIT_FAILED


def _print_stacks(stacks: Row) -> None:
    text, reason = stacks.get("text"), stacks.get("reason")
    for line in text.splitlines() if isinstance(text, str) else ():
        print(plain(line))
    if reason:
        print(f"{'note' if text else 'no stacks'}: {tables.field('', reason)}")


def _remove(options: Options, method: str, done: str) -> int:
    worker, reason = options.worker, {} if options.reason is None else {"reason": options.reason}
    with DaemonConnection(options) as daemon:
        job = _named_job(options) or _find(daemon, options)[0]
        reply = answers.one(daemon, method, job=job, worker_id=worker, **reason)
    said = done.format(worker=worker, job=job)
    answer(options, {"job": job, "id": worker, **reply}, lambda: _print_removed(said, reply))
    return EXIT_OK


def _print_removed(said: str, reply: Row) -> None:
    print(tables.field("", said))
    tables.notes(reply)


def _named_job(options: Options) -> str | None:
    """The job given by `--job`, before or after the verb."""
    return options.job or next(reversed(options.jobs), None)


# Requests.


def listed(daemon: PlainConnection, jobs: Iterable[str], after: str = "") -> Iterator[Row]:
    """The workers of these jobs, of each job those with ids greater than `after`."""
    for job in jobs:
        yield from answers.pages_unless(
            daemon, UNTRAINED, "ListWorkers", field="workers", key="id", after=after, job=job
        )


def _jobs(daemon: PlainConnection) -> list[str]:
    return [f"{job.get('name')}" for job in answers.pages(daemon, "ListJobs", field="jobs", key="name")]


def _required(daemon: PlainConnection, job: str) -> list[Row]:
    """The workers of a job; refused if the job does not exist."""
    workers = list(listed(daemon, [job]))
    if not workers:
        answers.one(daemon, "ShowJob", job=job)
    return workers


def _find(daemon: PlainConnection, options: Options) -> tuple[str, Row]:
    """The named worker and its job."""
    worker, named = options.worker, _named_job(options)
    if named:
        return named, answers.one(daemon, "ShowWorker", job=named, worker_id=worker)
    found = [
        (job, row)
        for job in _jobs(daemon)
        if (row := answers.one_unless(daemon, ABSENT, "ShowWorker", job=job, worker_id=worker))
    ]
    if not found:
        raise RequestRefused("worker_unknown", f"no job has a worker {worker!r}", "see `forgectl workers ls`")
    if len(found) > 1:
        jobs = tables.names([job for job, _ in found])
        raise RequestRefused(
            "worker_ambiguous", f"several jobs have a worker {worker!r}: {jobs}", "choose one with --job"
        )
    return found[0]
