"""`forged demo` as a process: successful, interrupted, and with injected errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from uuid import uuid4

import pytest

ENDS_WITHIN_S = 150.0
STEPS = "60"
SAMPLES, BATCH = 2400, 240
FIGURES = (
    "recovery_s", "join_s", "outage_s", "outage_steps", "rescales", "shards_moved", "final_loss", "reference_loss",
    "canary_rollback_s",
)  # fmt: skip
SKIPS_A_SAMPLE = """
    whole = Training.batch
    def batch(self):
        samples = whole(self)
        return samples[:-1] if self.rank == 0 and self.step == 20 else samples
    Training.batch = batch
"""
SAYS_ONE_THING_AND_DOES_ANOTHER = """
    whole, reads = Reader.read, []
    def read(self, which):
        reads.append(which)
        return whole(self, which[1:] if len(reads) == 20 else which)
    Reader.read = read
"""
DAMAGES_A_SHARD = """
    end = Training.close
    def close(self):
        end(self)
        for shard in Path(sys.orig_argv[-3], 'shards', sys.orig_argv[-4]).glob('shard-0.*'):
            shard.write_bytes(bytes(shard.stat().st_size))
    Training.close = close
"""


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "forged.cli.forged", "demo", "--steps", STEPS, *flags]


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*flags), env=os.environ | environment, capture_output=True, text=True, timeout=ENDS_WITHIN_S
    )


def processes_with(mark: str) -> list[str]:
    """The commands of all processes that have this in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def kinds_after_the_kill(printed: str) -> list[str]:
    """The kinds of the facts that the demo quotes."""
    said = printed.splitlines()
    result = said[next(at for at, line in enumerate(said, 1) if "$ forgectl story" in line) :]
    quoted = takewhile(lambda line: line.startswith("   | "), result)
    return [next(kind for kind in line.split() if kind[0].isupper()) for line in quoted]


def test_demo_in_a_pipe_succeeds_with_plain_text(tmp_path: Path) -> None:
    mark = uuid4().hex
    done = run("--workers", "3", MARK_OF_THE_TEST=mark, TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "All checks passed." in done.stdout
    assert "\x1b" not in done.stdout
    assert "FAIL" not in done.stdout
    assert processes_with(mark) == []
    assert list(tmp_path.iterdir()) == []
    # The worker may die while one of its states is being saved: its host saves it then.
    kinds = [kind for kind in kinds_after_the_kill(done.stdout) if kind != "EmergencyCheckpointSaved"]
    assert kinds == [
        "WorkerFailed",
        "RescaleStarted",
        "RescaleSynchronising",
        "TransfersPlanned",
        "TransfersCompleted",
        "RescaleCompleted",
    ]


def test_json_output_is_one_object(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = run("--json", "--workers", "3", "--keep", str(kept))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    result = json.loads(done.stdout)
    assert (result["ok"], result["problems"], result["workers"]) == (True, [], 3)
    assert all(check["held"] for check in result["checks"])
    assert all(result[name] > 0 for name in FIGURES)
    assert result["steps"] == result["covered"] >= int(STEPS)
    assert result["model_serving"] == "0.1.0"
    assert result["final_loss"] == pytest.approx(result["reference_loss"], abs=1e-9)
    # To hand shards over and to leave are one.
    assert result["rescales"] == 4
    assert result["audit"] == {
        # The one that was begun last may be at its very end.
        "epochs": (result["steps"] * BATCH - 1) // SAMPLES,
        "samples": SAMPLES,
        "used": result["steps"] * BATCH,
        "complete": True,
    }
    assert sorted(path.name for path in (kept / "shards").iterdir()) == ["w0", "w1", "w2", "w3"]
    assert sorted(path.name for path in kept.glob("*.jsonl")) == ["w0.jsonl", "w1.jsonl", "w2.jsonl", "w3.jsonl"]


@pytest.mark.parametrize(
    ("name", "code", "until"),
    [(signal.SIGINT, 130, "attempt 1 committed"), (signal.SIGTERM, 143, "(the daemon)")],
)
def test_interrupted_demo_leaves_no_process_and_no_file(
    name: signal.Signals, code: int, until: str, tmp_path: Path
) -> None:
    mark = uuid4().hex
    environment = os.environ | {"MARK_OF_THE_TEST": mark, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command("--workers", "3"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        assert any(until in line for line in demo.stdout)
        assert len(processes_with(mark)) > 3
        demo.send_signal(name)
        _, error = demo.communicate(timeout=ENDS_WITHIN_S)
    assert (demo.returncode, error) == (code, "")
    assert processes_with(mark) == []
    assert list(tmp_path.iterdir()) == []


def test_a_closed_output_stops_the_demo_before_the_proof(tmp_path: Path) -> None:
    mark = uuid4().hex
    environment = os.environ | {"MARK_OF_THE_TEST": mark, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command("--workers", "2"), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        assert demo.stderr is not None
        demo.stdout.readline()
        demo.stdout.close()
        error = demo.stderr.read()
        assert demo.wait(ENDS_WITHIN_S) == 1
    assert error.startswith("forged: the reader closed the output")
    assert processes_with(mark) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("faults", "findings"),
    [
        (SKIPS_A_SAMPLE + DAMAGES_A_SHARD, {"step 20 left out samples ", "shard 0 at "}),
        (SAYS_ONE_THING_AND_DOES_ANOTHER, {"a parameter differs by "}),
    ],
)
def test_demo_with_worker_faults_fails_and_names_them(faults: str, findings: set[str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "if 'forged.demo.train' in sys.orig_argv:\n"
        "    from forged.demo.dataset import DatasetReader as Reader\n"
        f"    from forged.worker.blocking import Training\n{faults}"
    )
    done = run("--json", "--workers", "2", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert not result["ok"]
    assert {finding for finding in findings if any(one.startswith(finding) for one in result["problems"])} == findings


def test_demo_with_a_worker_that_does_not_start_fails_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'forged.demo.train' in sys.orig_argv and 'w1' in sys.orig_argv:\n    sys.exit('no memory')\n"
    )
    done = run("--workers", "2", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "w1 ended with exit code 1: SystemExit: no memory" in done.stdout
    assert "Some checks failed." in done.stdout


def test_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("--keep", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not empty" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("flags", "code"), [(("--keep", "."), "keep_in_use"), (("--workers", "1"), "usage_wrong"), (("-x",), "usage_wrong")]
)
def test_refusal_is_a_json_object(flags: tuple[str, ...], code: str) -> None:
    done = run("--json", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert json.loads(done.stderr)["error"]["code"] == code


@pytest.mark.parametrize("flags", [("--workers", "1"), ("--workers", "33"), ("--workers", "x"), ("--steps", "0")])
def test_invalid_sizes_are_refused(flags: tuple[str, str]) -> None:
    done = run(*flags)
    assert done.returncode == 2
    assert "must be an integer in" in done.stderr
