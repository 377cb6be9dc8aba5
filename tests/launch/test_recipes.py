"""The recipe for Slurm, with stand-ins of its commands that set the variables of Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launch_process import ENDS_WITHIN_S, SCRIPT
from tests.test_docs import ROOT

RECIPES = ROOT / "examples" / "launch"
HOSTS = 2
SRUN = f"""#!/bin/bash
# Runs a task for each host, and ends with the highest exit code, as srun does.
while [[ $1 == --* ]]; do shift; done
for host in $(seq 0 {HOSTS - 1}); do SLURM_NODEID=$host SLURM_PROCID=$host "$@" & tasks+=($!); done
code=0
for task in "${{tasks[@]}}"; do wait "$task" || code=$(( $? > code ? $? : code )); done
exit $code
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script, with the commands of Slurm."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": f'#!/bin/bash\necho "$@" >> {tmp_path}/scontrol\n'}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o700)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    names = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "llm", "SLURM_NNODES": f"{HOSTS}"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FORGED_")}
    return inherited | names | {"PATH": path, "TMPDIR": str(tmp_path), "WORKERS_PER_HOST": "2"}


def test_recipe_for_slurm_trains_on_all_hosts_and_leaves_nothing(slurm: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [str(RECIPES / "slurm.sh"), SCRIPT, "5"], env=slurm, capture_output=True, text=True, timeout=ENDS_WITHIN_S
    )
    assert done.returncode == 0, done.stderr
    trained = sorted(line for line in done.stdout.splitlines() if "made" in line)
    assert trained == [f"[{rank}]: made 5 steps" for rank in range(4)]
    assert {line.rpartition("world of ")[2] for line in done.stdout.splitlines() if "world of" in line} == {"4"}
    assert not list(tmp_path.glob("forged-*"))
    assert not (tmp_path / "scontrol").exists()


def test_recipe_for_slurm_is_queued_again_when_it_was_drained(slurm: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "drained.py"
    script.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nsignal.pause()\n")
    done = subprocess.run(
        [str(RECIPES / "slurm.sh"), str(script)], env=slurm, capture_output=True, text=True, timeout=ENDS_WITHIN_S
    )
    assert done.returncode == 143, done.stderr
    assert (tmp_path / "scontrol").read_text() == "requeue 7\n"
