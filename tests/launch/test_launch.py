"""`forged launch` with real workers and a real daemon."""

from __future__ import annotations

import json
import os
import re
import select
import signal
from pathlib import Path

from forged.auth.model import Role
from forged.client import BlockingClient
from forged.elastic.messages import ClusterView, WorkerView
from tests.client.threaded_daemon import ThreadedDaemon
from tests.launch.launch_process import ENDS_WITHIN_S, SCRIPT, LaunchProcess, is_alive, run
from tests.test_docs import ROOT, blocks

FOREVER = "1000000000"
TRAINS = r"(\d+) trains in a world of {}\b"


def pids(launch: LaunchProcess, world_size: int) -> list[int]:
    """The processes of the workers of a world, once all of them train in it."""
    return [int(match[1]) for match in launch.wait_for(TRAINS.format(world_size), times=world_size)]


def test_launch_without_an_endpoint_trains_with_a_daemon_of_its_own(tmp_path: Path) -> None:
    code, lines = run("-n", "2", "--log-dir", str(tmp_path), SCRIPT, "5")
    assert (code, sorted(line for line in lines if "made" in line)) == (0, ["[0]: made 5 steps", "[1]: made 5 steps"])
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert [log.splitlines()[-1] for log in logs] == ["made 5 steps"] * 2


def test_daemon_of_its_own_is_started_again(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with LaunchProcess("-n", "2", "--daemon-dir", str(tmp_path), SCRIPT, FOREVER, str(stop)) as launch:
        workers = pids(launch, 2)
        children = Path(f"/proc/{launch.process.pid}/task/{launch.process.pid}/children").read_text().split()
        [daemon] = [pid for pid in children if b"forged.cli.forged" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(daemon), signal.SIGKILL)
        launch.wait_for("the daemon was killed by SIGKILL, and starts again")
        # Only the new one can make a world.
        os.kill(workers[0], signal.SIGKILL)
        pids(launch, 2)
        stop.touch()
        assert launch.end() == 0


def test_example_of_the_page_trains(endpoint: str, tmp_path: Path) -> None:
    [example] = blocks(ROOT / "docs" / "launch.md", "python")
    script = tmp_path / "train.py"
    script.write_text(example.replace("1000", "10"))
    assert run("-n", "2", "--endpoint", endpoint, str(script))[0] == 0
    with BlockingClient(endpoint) as client:
        assert client.cluster("train").state.current_step == 10


def test_killed_worker_is_replaced(endpoint: str, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with LaunchProcess("-n", "3", "--endpoint", endpoint, SCRIPT, FOREVER, str(stop)) as launch:
        os.kill(pids(launch, 3)[0], signal.SIGKILL)
        launch.wait_for(r"worker \d was killed by SIGKILL, and starts again in 1 s")
        pids(launch, 3)
        stop.touch()
        assert launch.end() == 0


def test_sigterm_drains_all_workers(endpoint: str, client: BlockingClient) -> None:
    with LaunchProcess("-n", "2", "--job", "llm", "--endpoint", endpoint, SCRIPT, FOREVER) as launch:
        workers = pids(launch, 2)
        assert launch.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert sum("made" in line for line in launch.lines) == 2
    assert not any(map(is_alive, workers))
    assert client.cluster("llm").failures == 0


def test_second_interrupt_kills_workers_that_ignore_the_first(endpoint: str, tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text("import signal\nsignal.signal(2, signal.SIG_IGN)\nprint('ignores it')\nsignal.pause()\n")
    with LaunchProcess("-n", "2", "--endpoint", endpoint, str(script)) as launch:
        launch.wait_for("ignores it", times=2)
        launch.process.send_signal(signal.SIGINT)
        launch.wait_for("interrupted, for at most")
        assert launch.end(signal.SIGINT) == 128 + signal.SIGINT


def test_workers_that_do_not_drain_in_time_are_killed(endpoint: str, tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text("import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ignores it')\nsignal.pause()\n")
    with LaunchProcess("--drain-timeout", "0.1", "--endpoint", endpoint, str(script)) as launch:
        launch.wait_for("ignores it")
        assert launch.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert "forged launch: worker 0 still ran after 0.1 s: killed" in launch.lines


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    # The shell and its child are in one process group; the kernel's signal reaches the shell alone.
    command = "echo shell $$; sleep 1000 & echo child $!; wait"
    directory = tmp_path / "daemon"
    with LaunchProcess("--daemon-dir", str(directory), "--", "bash", "-c", command) as launch:
        found = [int(match[1]) for match in launch.wait_for(r"(?:shell|child) (\d+)", times=2)]
        descriptors = [os.pidfd_open(pid) for pid in found]
        launch.process.kill()
        for descriptor in descriptors:
            watch = select.poll()
            watch.register(descriptor, select.POLLIN)
            assert watch.poll(ENDS_WITHIN_S * 1000)
            os.close(descriptor)


def test_failed_worker_is_restarted_though_its_child_holds_the_output(endpoint: str) -> None:
    command = "sleep 1000 & exit 5"
    code, lines = run("--max-restarts", "1", "--endpoint", endpoint, "--job", "held", "--", "bash", "-c", command)
    assert code == 1
    assert any("starts again" in line for line in lines)


def test_crash_loop_ends_with_the_last_lines_of_the_worker(endpoint: str, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import os\nprint('restart', os.environ['TORCHELASTIC_RESTART_COUNT'])\nraise ValueError('lr')\n")
    code, lines = run("--max-restarts", "1", "--endpoint", endpoint, str(script))
    assert code == 1
    assert [line for line in lines if "restart " in line and line.startswith("[0]")] == [
        "[0]: restart 0",
        "[0]: restart 1",
    ]
    said = next(number for number, line in enumerate(lines) if "worker 0 ended with exit code 1 after it was" in line)
    assert lines[said + 1 :][-1] == "    ValueError: lr"


def test_failed_worker_is_left_out_and_the_others_complete_the_job(endpoint: str, tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text(
        f"import os, runpy\nif os.environ['RANK'] == '1': os._exit(3)\nrunpy.run_path({SCRIPT!r}, None, '__main__')\n"
    )
    with BlockingClient(endpoint) as client:
        client.create_job("one", {"stability_window_ms": 100})
    code, lines = run("-n", "2", "--restart", "never", "--endpoint", endpoint, str(script), "5")
    assert (code, lines[-1]) == (0, "[0]: made 5 steps")
    assert "forged launch: worker 1 ended with exit code 3; it has printed nothing" in lines


def test_broken_group_is_started_again_as_a_whole(endpoint: str, tmp_path: Path) -> None:
    script = tmp_path / "group.py"
    script.write_text(
        "import os, signal\n"
        "print('start', os.environ['RANK'], os.environ['FORGED_GROUP_RANK'], os.environ['FORGED_GROUP'], os.getpid())\n"
        "signal.pause()\n"
    )
    with LaunchProcess("-n", "4", "--group-size", "2", "--endpoint", endpoint, str(script)) as launch:
        before = launch.wait_for(r"start (\d) (\d) (\S+) (\d+)", times=4)
        assert sorted(match[1] + match[2] for match in before) == ["00", "11", "20", "31"]
        groups = {match[1]: match[3] for match in before}
        assert groups["0"] == groups["1"] != groups["2"] == groups["3"]
        os.kill(next(int(match[4]) for match in before if match[1] == "3"), signal.SIGKILL)
        after = launch.wait_for(r"start (\d) (\d) (\S+) (\d+)", times=2)
        assert sorted(match[1] for match in after) == ["2", "3"]
        assert {match[3] for match in after}.isdisjoint(groups.values())


def test_output_is_one_json_object(endpoint: str) -> None:
    with LaunchProcess("--json", "--job", "llm", "--endpoint", endpoint, SCRIPT, "5") as launch:
        assert launch.end() == 0
    told = json.loads(next(line for line in launch.lines if line.startswith("{")))
    [worker] = told.pop("workers")
    assert (told.pop("seconds") > 0, worker.pop("pid") > 0) == (True, True)
    assert told == {"job": "llm", "exit_code": 0, "phase": "completed", "step": 5}
    assert worker == {"rank": 0, "exit_code": 0, "restarts": 0, "problem": "", "log": None}


class TestAJobThatIsOver:
    def test_completed_job_is_left_alone(self, endpoint: str) -> None:
        launch = ("--job", "llm", "--endpoint", endpoint, SCRIPT, "5")
        assert run(*launch)[0] == 0
        code, lines = run(*launch)
        assert code == 0
        assert "job llm is complete after step 5: nothing to do" in lines[0]

    def test_completed_job_is_begun_anew(self, endpoint: str, client: BlockingClient) -> None:
        client.create_job("llm", {"stability_window_ms": 100})
        launch = ("--job", "llm", "--endpoint", endpoint, "--restart-job", "always", SCRIPT)
        assert [run(*launch, "5")[0], run(*launch, "7")[0]] == [0, 0]
        view: ClusterView = client.cluster("llm")
        assert view.state.current_step == 7
        assert client.job("llm").settings == {"stability_window_ms": 100}

    def test_aborted_job_is_refused_or_reopened(self, endpoint: str, client: BlockingClient) -> None:
        launch = ("--job", "llm", "--endpoint", endpoint)
        with LaunchProcess(*launch, SCRIPT, FOREVER) as running:
            pids(running, 1)
            client.abort_job("llm", "a test")
            # Its worker is not started again for a job that is over.
            assert running.end() == 1
        code, lines = run(*launch, SCRIPT, "5")
        assert code == 3
        assert re.search(r"job llm was aborted after step \d+: a test", lines[0])
        code, _ = run(*launch, "--restart-job", "if-aborted", SCRIPT, "5")
        assert code == 0

    def test_refusal_by_a_daemon_of_its_own_is_told(self, tmp_path: Path) -> None:
        launch = ("--job", "llm", "--daemon-dir", str(tmp_path))
        with LaunchProcess(*launch, SCRIPT, FOREVER) as running:
            pids(running, 1)
            with BlockingClient(f"unix://{tmp_path}/forged.sock") as client:
                client.abort_job("llm", "a test")
            assert running.end() == 1
        code, lines = run(*launch, SCRIPT, "5")
        assert code == 3
        assert lines[-1].startswith("forged: job llm was aborted after step")


def test_token_of_a_worker_is_enough(threaded_daemon: ThreadedDaemon, client: BlockingClient) -> None:
    client.create_job("llm", {"stability_window_ms": 100})
    token = client.create_token("launch", Role.WORKER, jobs=["llm"])
    launch = ("-n", "2", "--endpoint", f"unix://{threaded_daemon.socket}", SCRIPT, "5")
    assert run(*launch, FORGED_TOKEN=token, FORGED_JOB="llm")[0] == 0
    workers: list[WorkerView] = client.workers("llm")
    assert workers == []
