"""`forged launch`: start the workers of a job on this host."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forged.cli.process import remark, say
from forged.errors import ConfigError

if TYPE_CHECKING:
    from forged.launch.launcher import LaunchResult
    from forged.launch.plan import LaunchPlan

COMMAND_END = "\0"
"""Stands for the rest of the command line; no argument can contain it."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "launch",
        help="start the workers of a job on this host, and restart them",
        usage="%(prog)s [-n N] [options] (script.py | -m module | -- command) ...",
    )
    option = parser.add_argument
    option("-n", "--workers", type=_integer, default=1, metavar="N", help="workers on this host (default: 1)")
    option("--job", metavar="JOB", help="name of the job (default: $FORGED_JOB, else the name of the script)")
    option("--endpoint", action="append", metavar="URL", help="daemon (default: $FORGED_ENDPOINT); repeatable")
    option("--token", metavar="TEXT", help="access token (default: $FORGED_TOKEN)")
    option(
        "--daemon", action="store_true", help="run a daemon for this launch; without an endpoint that is the default"
    )
    option("--daemon-dir", type=Path, metavar="DIR", help="keep the state of that daemon in this directory")
    option("--nnodes", type=_integer, default=1, metavar="N", help="hosts that run this command (default: 1)")
    option("--node-rank", type=_integer, default=0, metavar="R", help="number of this host, from 0 (default: 0)")
    option("--master-addr", metavar="HOST", help="$MASTER_ADDR of the workers (default: this host, or the daemon's)")
    option("--master-port", type=_integer, metavar="PORT", help="$MASTER_PORT of the workers")
    option(
        "--group-size", type=_integer, default=1, metavar="K", help="workers that live and die together (default: 1)"
    )
    option("--restart", default="on-failure", metavar="POLICY", help="never, on-failure (default) or always")
    option("--max-restarts", type=_integer, default=3, metavar="N", help="restarts in a row of a worker (default: 3)")
    option("--restart-job", default="never", metavar="POLICY", help="if the job is over: never, if-aborted or always")
    option("--drain-timeout", type=_seconds, default=30.0, metavar="S", help="seconds until kill -9 after a signal")
    option("--log-dir", type=Path, metavar="DIR", help="also write the output of each worker into this directory")
    option("--json", action="store_true", help="print one JSON object at the end, and all else to standard error")
    option("-m", "--module", action="store_true", help="the script is a module, as for `python -m`")
    option("script", metavar="script.py", help="what each worker runs")
    option("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(act=launch, is_command=False)


def parsed(words: Sequence[str], parse: Callable[[Sequence[str]], argparse.Namespace]) -> argparse.Namespace:
    """Parse a command line of `forged`. After the first `--` of a launch are a command, or arguments of its script."""
    if words[:1] != ["launch"] or "--" not in words:
        return parse(words)
    end = words.index("--")
    options, rest = parse([*words[:end], COMMAND_END]), words[end + 1 :]
    if options.script == COMMAND_END:
        options.script, options.arguments, options.is_command = "", list(rest), True
    else:
        options.arguments[-1:] = ["--", *rest]
    return options


def launch(options: argparse.Namespace) -> int:
    """Run the workers to their end; returns the exit code of the launch."""
    import anyio

    from forged.launch.console import Console
    from forged.launch.job import JobRestart
    from forged.launch.launch import DaemonChoice
    from forged.launch.launch import launch as run

    restart_job = JobRestart(_choice("--restart-job", options.restart_job, tuple(JobRestart)))
    endpoints = _endpoints(options)
    plan = _plan(options, endpoints)
    cores = len(os.sched_getaffinity(0))
    if plan.workers > cores:
        remark(f"forged launch: {plan.workers} workers share {cores} cores")
    token = options.token if options.token is not None else os.environ.get("FORGED_TOKEN")
    daemon = DaemonChoice(endpoints=endpoints, token=token or None, directory=options.daemon_dir)
    log_dir = options.log_dir
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("log_dir_invalid", f"--log-dir {log_dir}: {error.strerror}", "name another") from error
    output = sys.stderr if options.json else sys.stdout
    console = Console(output.buffer, sys.stderr.buffer, is_terminal=sys.stderr.isatty())
    result = anyio.run(run, plan, daemon, restart_job, log_dir, console)
    if options.json:
        say(_as_json(plan, result))
    return result.exit_code


def _plan(options: argparse.Namespace, endpoints: Sequence[str]) -> LaunchPlan:
    from forged.ids import check_name
    from forged.launch.plan import MASTER_PORT, LaunchPlan
    from forged.launch.restarts import RestartLimits, RestartPolicy

    if options.max_restarts < 0:
        raise ConfigError("option_invalid", f"--max-restarts must be >= 0, got {options.max_restarts}", "see --help")
    policy = RestartPolicy(_choice("--restart", options.restart, tuple(RestartPolicy)))
    is_alone = options.nnodes == 1
    return LaunchPlan(
        command=_command(options),
        job=check_name("job", options.job or os.environ.get("FORGED_JOB") or _job_name(options)),
        workers=options.workers,
        hosts=options.nnodes,
        host_number=options.node_rank,
        group_size=options.group_size,
        master_addr=options.master_addr or ("127.0.0.1" if is_alone else _host(endpoints)),
        master_port=options.master_port or (_free_port() if is_alone else MASTER_PORT),
        limits=RestartLimits(policy, options.max_restarts),
        drain_timeout_s=options.drain_timeout,
    )


def _endpoints(options: argparse.Namespace) -> tuple[str, ...]:
    """The endpoints of the daemon; none for a daemon of the launch."""
    is_own = options.daemon or options.daemon_dir is not None
    if is_own and options.endpoint:
        raise ConfigError(
            "option_invalid", "--endpoint names a daemon, and --daemon runs another", "leave one of them out"
        )
    found = tuple(options.endpoint or filter(None, os.environ.get("FORGED_ENDPOINT", "").split(",")))
    endpoints = () if is_own else found
    if options.nnodes > 1 and not endpoints:
        raise ConfigError(
            "endpoint_missing",
            f"{options.nnodes} hosts need one daemon that all of them reach, and no endpoint is given",
            "start one with `forged run --listen HOST:PORT` and pass --endpoint or $FORGED_ENDPOINT",
        )
    return endpoints


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    """What each worker runs; it must exist."""
    if options.is_command:
        if not options.arguments:
            raise ConfigError("command_missing", "there is no command after --", "see `forged launch --help`")
        if shutil.which(options.arguments[0]) is None:
            raise ConfigError("command_missing", f"there is no command {options.arguments[0]}", "check $PATH")
        return tuple(options.arguments)
    python = (sys.executable, "-u")
    if options.module:
        if not _is_module(options.script):
            raise ConfigError(
                "module_missing", f"there is no module {options.script}", "check the name and $PYTHONPATH"
            )
        return (*python, "-m", options.script, *options.arguments)
    if not Path(options.script).exists():
        fix = "use `forged launch [options] script.py`, `-m module`, or `-- command`"
        raise ConfigError("script_missing", f"there is no file {options.script}", fix)
    return (*python, options.script, *options.arguments)


def _is_module(name: str) -> bool:
    # A worker finds modules in the working directory too.
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except ValueError:
        return False
    finally:
        sys.path.pop(0)


def _job_name(options: argparse.Namespace) -> str:
    """The name of what is launched, as a name of a job."""
    word = options.arguments[0] if options.is_command else options.script
    name = word if options.module else Path(word).stem
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).strip("._-") or "launch"


def _host(endpoints: Sequence[str]) -> str:
    """The host of the first endpoint."""
    from forged.net.transport.port import Address

    return Address.parse(endpoints[0]).host or "127.0.0.1"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _choice(option: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ConfigError("option_invalid", f"{option} must be one of {', '.join(choices)}, got {value}", "see --help")
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None


def _seconds(text: str) -> float:
    from forged.cli.forgectl.values import seconds

    return seconds(text)


def _as_json(plan: LaunchPlan, result: LaunchResult) -> str:
    from json import dumps

    view = result.view
    workers = [
        {
            "rank": slot.rank,
            "pid": slot.process and slot.process.pid,
            "exit_code": slot.code,
            "restarts": slot.restarts,
            "problem": slot.problem,
            "log": slot.log and str(slot.log),
        }
        for slot in result.slots
    ]
    return dumps(
        {
            "job": plan.job,
            "exit_code": result.exit_code,
            "phase": view and view.phase,
            "step": view and view.state.current_step,
            "seconds": round(result.seconds, 3),
            "workers": workers,
        }
    )
