"""A whole launch: a local daemon if one is wanted, the job, and its workers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from forged.client import ForgedClient
from forged.elastic.messages import ClusterView
from forged.elastic.phases import Phase
from forged.errors import ForgedError, RequestRefused
from forged.launch.console import Console
from forged.launch.daemon_process import DaemonProcess
from forged.launch.guard import Guard, guarding
from forged.launch.job import JobRestart, LaunchedJob
from forged.launch.launcher import Launcher, LaunchResult
from forged.launch.plan import LaunchPlan
from forged.launch.restarts import Finished, RestartHistory, RestartLimits, RestartPolicy, in_words

DAEMON_LOG = "daemon.log"


@dataclass(frozen=True, kw_only=True)
class DaemonChoice:
    """The daemon of a launch: one that runs, or one of its own in a directory."""

    endpoints: Sequence[str] = ()
    """Empty: a daemon of its own."""
    token: str | None = None
    directory: Path | None = None
    """Of the daemon of its own; None: a temporary one."""


async def launch(
    plan: LaunchPlan, daemon: DaemonChoice, restart_job: JobRestart, log_dir: Path | None, console: Console
) -> LaunchResult:
    """Run the workers to their end."""
    try:
        return await _launch_with_daemon(plan, daemon, restart_job, log_dir, console)
    except BaseExceptionGroup as group:
        # The tasks that keep the daemon and the workers wrap the error of one of them.
        errors, others = group.split(ForgedError)
        if errors is None or others is not None:
            raise
        raise _first(errors) from None


def _first(group: BaseExceptionGroup[ForgedError]) -> ForgedError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _launch_with_daemon(
    plan: LaunchPlan, daemon: DaemonChoice, restart_job: JobRestart, log_dir: Path | None, console: Console
) -> LaunchResult:
    temporary = None
    if not daemon.endpoints and daemon.directory is None:
        temporary = Path(tempfile.mkdtemp(prefix="forged-launch-"))
    with guarding(temporary) as guard:
        if daemon.endpoints:
            return await _launch(plan, daemon.endpoints, daemon.token, restart_job, log_dir, console, guard)
        directory = temporary or daemon.directory
        assert directory is not None
        async with _own_daemon(directory, console, guard) as endpoint:
            console.say(f"job {plan.job}: FORGED_ENDPOINT={endpoint} forgectl jobs watch {plan.job}")
            return await _launch(plan, [endpoint], None, restart_job, log_dir, console, guard)


async def _launch(
    plan: LaunchPlan,
    endpoints: Sequence[str],
    token: str | None,
    restart_job: JobRestart,
    log_dir: Path | None,
    console: Console,
    guard: Guard,
) -> LaunchResult:
    # An empty token means none, also where the environment names one for another daemon.
    async with ForgedClient(*endpoints, token=token or "") as client:
        job = LaunchedJob(client, plan.job)
        over = await job.restart(restart_job, is_first_host=plan.host_number == 0)
        if over is not None:
            return _nothing_to_do(over, console)
        launcher = Launcher(plan, console, job, guard, ",".join(endpoints), token, log_dir)
        return await launcher.run()


def _nothing_to_do(view: ClusterView, console: Console) -> LaunchResult:
    if view.phase is Phase.COMPLETED:
        console.say(
            f"job {view.job} is complete after step {view.state.current_step}: nothing to do"
            " (`--restart-job always` begins it anew, `--job` names another)"
        )
        return LaunchResult(0, [], view, 0.0)
    raise RequestRefused(
        "job_over",
        f"job {view.job} was aborted after step {view.state.current_step}: {view.reason}",
        "`--restart-job if-aborted` lets it continue, `--job` names another",
    )


@contextlib.asynccontextmanager
async def _own_daemon(directory: Path, console: Console, guard: Guard) -> AsyncIterator[str]:
    """A daemon inside the block, started again if it dies."""
    await anyio.Path(directory).mkdir(parents=True, exist_ok=True)
    daemon = DaemonProcess(directory, log=directory / DAEMON_LOG)
    await daemon.start()
    guard.add(daemon.pid)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_keep_daemon, daemon, console, guard)
        try:
            yield f"unix://{daemon.socket}"
        finally:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await daemon.stop()


async def _keep_daemon(daemon: DaemonProcess, console: Console, guard: Guard) -> None:
    history = RestartHistory(RestartLimits(policy=RestartPolicy.ALWAYS))
    while True:
        began, pid = anyio.current_time(), daemon.pid
        code = await daemon.wait()
        guard.remove(pid)
        decision = history.ended(code, anyio.current_time() - began, job_is_over=False)
        if isinstance(decision, Finished):
            console.say(f"the daemon {decision.problem}; training continues until it needs one")
            return
        console.say(f"the daemon {in_words(code)}, and starts again")
        await anyio.sleep(decision.after_s)
        try:
            await daemon.start()
        except ForgedError as error:
            console.say(f"{error}")
            return
        guard.add(daemon.pid)
