"""`forgectl jobs`: the jobs of a daemon, and the control of their training."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from posixpath import dirname
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import UNTOLD, Row, known
from forged.cli.forgectl.commands import transfers, watch
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer, print_json
from forged.cli.forgectl.parser import Options, Parser, add_reason, positional, verb, verbs_of
from forged.cli.forgectl.values import seconds, settings, version
from forged.cli.process import EXIT_OK, stop_without_reader
from forged.plain_client.connection import PlainConnection

COLUMNS = ("name", "phase", "version", "created_at", "created_by", "settings")
WATCH_INTERVAL_S = 0.2
WITHOUT_CATALOGUE = frozenset({"request_unknown"})
INDENT = 2
"""Indentation of the wrapped lines of a sentence."""


def fill(jobs: Parser) -> None:
    """Add the verbs."""
    verbs = verbs_of(jobs, _list)
    verb(verbs, "ls", _list, "list jobs with the phase of their training", aliases=["list"])
    create = verb(verbs, "create", _create, "create a job; succeeds if it exists with the same settings")
    positional(create, "name", "NAME")
    positional(create, "settings", "KEY=VALUE", nargs="*")
    change = verb(verbs, "change", _change, "change settings of a job; KEY= restores the default")
    positional(change, "name", "JOB")
    positional(change, "settings", "KEY=VALUE", nargs="+")
    change.add_argument("--version", type=version, metavar="N", help="fail unless the job has this version")
    _of_job(verb(verbs, "show", _show, "show a job and its training"))
    remove = verb(verbs, "rm", _remove, "remove a job", aliases=["remove"])
    positional(remove, "name", "JOB")
    remove.add_argument("--force", action="store_true", help="remove the job even if it has workers")
    for name, act, text in _CONTROL_VERBS:
        add_reason(_of_job(verb(verbs, name, act, text)))
    watching = _of_job(verb(verbs, "watch", _watch, "show a job's training live: steps, values, ranks, goodput"))
    watching.add_argument("--once", action="store_true", help="show it once")
    watching.add_argument(
        "--interval", type=seconds, metavar="S", help="seconds between two looks (1; 5 where the output is no terminal)"
    )
    watching.add_argument("--rescale", action="store_true", help="follow only the current rescale, until it ends")


def _of_job(parser: Parser) -> Parser:
    positional(parser, "name", "JOB")
    return parser


# Jobs.


def _create(options: Options) -> int:
    wanted = settings(options.settings)
    with DaemonConnection(options) as daemon:
        job = answers.one(daemon, "CreateJob", job=options.name, settings=wanted)
        answer(options, job, lambda: _print_job(job))
    return EXIT_OK


def _list(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        jobs = answers.pages(daemon, "ListJobs", field="jobs", key="name")
        phases = _phases(daemon)
        jobs = [job | phases.get(f"{job.get('name')}", {}) for job in jobs]
        rows = [job | {"phase": _shown_phase(job)} for job in jobs]
        answer(options, {"jobs": jobs}, lambda: tables.table(rows, COLUMNS, "no jobs"))
    return EXIT_OK


def _show(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        job = answers.one(daemon, "ShowJob", job=options.name)
        training = _training(daemon, options.name)
        moving = transfers.under_way(daemon, options.name, training)
        goodput = _goodput(daemon, options.name)
    parts = (("training", training), ("transfers", moving), ("goodput", goodput))
    about = {name: value for name, value in parts if value}
    answer(options, job | about, lambda: _print_job(job))
    if not options.json:
        if training:
            _print_training(training)
        if moving:
            print(f"\ntransfers: {transfers.summary(moving)}")
        if goodput:
            print()
            watch.print_goodput(goodput)
    return EXIT_OK


def _change(options: Options) -> int:
    wanted = settings(options.settings)
    with DaemonConnection(options) as daemon:
        present = answers.one(daemon, "ShowJob", job=options.name)
        expected = present.get("version") if options.version is None else options.version
        merged = _merged(present.get("settings"), wanted)
        job = answers.one(daemon, "ChangeJob", job=options.name, settings=merged, version=expected)
        answer(options, job, lambda: _print_job(job))
    return EXIT_OK


def _merged(present: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The present settings updated by the wanted ones; an empty text removes a setting."""
    old = present if isinstance(present, dict) else {}
    return {key: value for key, value in {**old, **wanted}.items() if key not in wanted or value != ""}


def _print_job(job: Row) -> None:
    """Print a job without its fence, which only clients need, and without an unset `created_with`."""
    tables.pairs(
        {key: value for key, value in job.items() if key != "fence" and (key, value) != ("created_with", None)}
    )


def _remove(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        left = answers.one_unless(daemon, WITHOUT_CATALOGUE, "ListCheckpoints", job=options.name)
        daemon.request("RemoveJob", job=options.name, **({"force": True} if options.force else {}))
        answer(options, {}, lambda: _print_removed(options.name, left))
    return EXIT_OK


def _print_removed(job: str, left: Row) -> None:
    """Print which checkpoints nothing collects any more, and how a later job takes them."""
    print(f"removed job {job}")
    paths = [path for one in answers.rows_in(left, "checkpoints") if isinstance(path := one.get("storage_path"), str)]
    for path in sorted({dirname(path) for path in paths if path}):
        folder = tables.field("", path)
        tables.print_wrapped(
            f"the files of its checkpoints stay in {folder}; "
            f"`forgectl ckpt adopt {folder} --job JOB` adds them to a job",
            INDENT,
        )


# Control of the training.


def _pause(options: Options) -> int:
    return _control(options, "PauseJob", _paused)


def _resume(options: Options) -> int:
    return _control(options, "ResumeJob", _resumed)


def _abort(options: Options) -> int:
    return _control(options, "AbortJob", _aborted)


def _reopen(options: Options) -> int:
    return _control(options, "ReopenJob", _reopened)


def _rescale(options: Options) -> int:
    return _control(options, "RescaleJob", _rescaled)


_CONTROL_VERBS = (
    ("pause", _pause, "pause training after the current step"),
    ("resume", _resume, "resume paused training"),
    ("abort", _abort, "abort training; all workers of the job end"),
    ("reopen", _reopen, "let an aborted job accept workers again"),
    ("rescale", _rescale, "start a rescale now with the workers that have joined"),
)


def _control(options: Options, method: str, describe: Callable[[Row], str]) -> int:
    reason = {} if options.reason is None else {"reason": options.reason}
    with DaemonConnection(options) as daemon:
        reply = answers.one(daemon, method, job=options.name, **reason)
        answer(
            options,
            reply,
            lambda: tables.print_wrapped(f"{tables.field('', options.name)}: {describe(reply)}", INDENT),
        )
    return EXIT_OK


def _paused(reply: Row) -> str:
    if not _has_changed(reply):
        return f"training was already paused{_because(reply)}"
    return "training pauses after the current step"


def _resumed(reply: Row) -> str:
    stalled = _stalled(reply)
    if not _has_changed(reply):
        return f"training was not paused{stalled}"
    return f"training is no longer paused{stalled}" if stalled else "training resumes"


def _aborted(reply: Row) -> str:
    if not _has_changed(reply):
        return f"training was already aborted{_because(reply)}"
    return "training is aborted and its workers end; `forgectl jobs reopen` lets new ones continue"


def _reopened(reply: Row) -> str:
    return f"the job accepts workers again{_stalled(reply)}"


def _rescaled(reply: Row) -> str:
    if not _has_changed(reply):
        return f"no rescale starts now{_stalled(reply)}"
    return "a rescale starts; follow it with `forgectl jobs watch --rescale`"


def _has_changed(reply: Row) -> bool:
    # An older daemon does not send the field.
    return reply.get("changed") is not False


def _because(reply: Row) -> str:
    return f": {tables.field('', reply['reason'])}" if reply.get("reason") else ""


def _watch(options: Options) -> int:
    return _watch_rescale(options) if options.rescale else watch.watch(options)


def _watch_rescale(options: Options) -> int:
    printed = ""
    with DaemonConnection(options) as daemon:
        while True:
            cluster = answers.one(daemon, "ShowCluster", job=options.name)
            line = _progress(cluster)
            if line != printed:
                print_json(cluster) if options.json else tables.print_wrapped(f"{line}{_stalled(cluster)}", INDENT)
                sys.stdout.flush()
            printed = line
            if not _is_rescaling(cluster):
                return EXIT_OK
            stop_without_reader()
            time.sleep(WATCH_INTERVAL_S)


# The state of the training.


def _training(daemon: PlainConnection, job: str) -> Row:
    """The state of a job's training; empty before the first worker joins, or if the daemon does not support it."""
    return answers.one_unless(daemon, UNTOLD, "ShowCluster", job=job)


def _goodput(daemon: PlainConnection, job: str) -> Row:
    """What a job's time was spent on; empty before its first world, or if the daemon does not know."""
    return answers.map_in(answers.one_unless(daemon, UNTOLD, "ReadTraining", job=job), "goodput")


def _phases(daemon: PlainConnection) -> dict[str, Row]:
    """The phase of each job that a worker has joined, and whether it is paused; empty if the daemon does not tell."""
    clusters = answers.pages_unless(daemon, UNTOLD, "ListClusters", field="clusters", key="job")
    return {
        f"{cluster.get('job')}": {"phase": cluster.get("phase")} | ({"paused": True} if cluster.get("paused") else {})
        for cluster in clusters
    }


def _shown_phase(job: Row) -> Any:
    is_over = job.get("phase") in ("completed", "aborted")
    return "paused" if job.get("paused") and not is_over else job.get("phase")


def _print_training(cluster: Row) -> None:
    whole = {key: value for key, value in cluster.items() if key not in _SHOWN_APART}
    if cluster.get("reason") == cluster.get("stall_report"):
        whole.pop("reason", None)
    # First what tells whether training makes progress.
    whole = {"phase": whole.pop("phase", None), "stall_report": cluster.get("stall_report") or None, **whole}
    state = cluster.get("state")
    if isinstance(state, dict):
        whole |= {name: known(key, state.get(key)) for key, name in _STATE_NAMES.items()}
    print()
    tables.pairs(whole)
    rescale = cluster.get("rescale")
    if isinstance(rescale, dict):
        print("\nrescale in progress:")
        tables.pairs(rescale)


_SHOWN_APART = frozenset({"job", "state", "rescale", "stall_report"})
_STATE_NAMES = {
    "current_epoch": "epoch",
    "current_step": "step",
    "learning_rate": "learning_rate",
    "global_batch_size": "global_batch_size",
    "state_timestamp": "updated_at",
}


def _is_rescaling(cluster: Row) -> bool:
    # Between two attempts, and after a restart of the daemon, only the phase says so.
    return isinstance(cluster.get("rescale"), dict) or cluster.get("phase") == "rescaling"


def _progress(cluster: Row) -> str:
    """The state of a rescale in one line, which changes when the rescale progresses."""
    rescale = cluster.get("rescale")
    if isinstance(rescale, dict):
        missing = rescale.get("waiting_for")
        waiting = f", waiting for {tables.names(missing)}" if isinstance(missing, list) and missing else ""
        attempt, stage = (tables.field("", rescale.get(key)) for key in ("attempt", "stage"))
        return f"attempt {attempt}: {stage}{waiting}{_bracketed(rescale.get('reason'))}"
    if _is_rescaling(cluster):
        return "rescaling: between two attempts"
    state = cluster.get("state")
    step = state.get("current_step") if isinstance(state, dict) else None
    phase, generation = (tables.field("", cluster.get(key)) for key in ("phase", "generation"))
    size = cluster.get("world_size")
    world = tables.counted(size, "worker") if isinstance(size, int) else tables.field("", size)
    group_size = cluster.get("group_size")
    world += f" in groups of {group_size}" if isinstance(group_size, int) and group_size > 1 else ""
    about = f"generation {generation}, {world}, step {tables.field('', step)}"
    reason = "" if cluster.get("stall_report") else _bracketed(cluster.get("reason"))
    return f"{phase}: {about}{reason}"


def _stalled(cluster: Row) -> str:
    """The stall report; empty during a rescale, which names what it waits for."""
    stall = cluster.get("stall_report")
    return "" if not stall or isinstance(cluster.get("rescale"), dict) else f"; {tables.field('', stall)}"


def _bracketed(reason: Any) -> str:
    return f" ({tables.field('', reason)})" if reason else ""
