"""The completion scripts; that of bash runs in a real bash."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forged.cli.forgectl import main
from forged.cli.forgectl.commands.completion import SCRIPTS
from tests.cli.scripted_daemon import scripted_daemon

BIN = Path(sys.executable).parent
PRESS_TAB = """
source <(forgectl completion bash)
compopt() { echo "compopt $*"; }
COMP_LINE=$1 COMP_POINT=${2:-${#1}}
_forgectl forgectl
printf '%s\\n' "${COMPREPLY[@]}"
"""


def press_tab(line: str, socket: Path, point: int | None = None, breaks: str = " \t\n\"'><=;|&(:") -> list[str]:
    """What bash is offered for a line, with what is said about how to go on."""
    environment = os.environ | {"FORGED_SOCKET": str(socket), "PATH": f"{BIN}:{os.environ['PATH']}"}
    script = f"COMP_WORDBREAKS={shlex.quote(breaks)}\n{PRESS_TAB}"
    told = ["bash", "-c", script, "bash", line, *([] if point is None else [str(point)])]
    done = subprocess.run(told, env=environment, cwd=socket.parent, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_script_is_printed_without_a_daemon(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGED_SOCKET", "/none")
    assert main.main(["completion", shell]) == 0
    assert capsys.readouterr().out == SCRIPTS[shell]
    assert main.main(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shell": shell, "script": SCRIPTS[shell]}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_its_shell_can_read_it(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    done = subprocess.run([shell, "-n"], input=SCRIPTS[shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


class TestBash:
    @pytest.mark.parametrize(
        ("line", "offered"),
        [
            ("forgectl sta", ["status"]),
            ("forgectl jobs r", ["rm", "resume", "rescale"]),
            ("forgectl jobs show ", ["alpha", "beta"]),
            ("forgectl jobs   show   al", ["alpha"]),
            ("forgectl events --job=b", ["beta"]),
            ("forgectl tokens create x --role=", ["viewer", "worker", "operator"]),
            ("forgectl nonsense ", []),
        ],
    )
    def test_words_are_completed(self, tmp_path: Path, line: str, offered: list[str]) -> None:
        with scripted_daemon(tmp_path, {"ListJobs": {"jobs": [{"name": "alpha"}, {"name": "beta"}]}}) as daemon:
            assert [word for word in press_tab(line, daemon.path) if word] == offered

    def test_only_what_stands_before_the_cursor_counts(self, tmp_path: Path) -> None:
        assert press_tab("forgectl st ping", tmp_path / "none", point=len("forgectl st")) == ["status", "story"]

    def test_where_bash_breaks_no_words_they_are_offered_whole(self, tmp_path: Path) -> None:
        offered = press_tab("forgectl tokens create x --role=w", tmp_path / "none", breaks=" \t\n")
        assert offered == ["--role=worker"]

    def test_a_directory_goes_on(self, tmp_path: Path) -> None:
        (tmp_path / "state").mkdir()
        assert press_tab("forgectl backup st", tmp_path / "none") == ["compopt -o nospace", "state/"]

    def test_what_a_name_holds_is_not_for_the_shell_to_run(self, tmp_path: Path) -> None:
        (tmp_path / "x$(touch ran)").touch()
        assert press_tab("forgectl backup x", tmp_path / "none") == [r"x\$\(touch\ ran\)"]
        assert not (tmp_path / "ran").exists()

    def test_without_a_daemon_there_is_silence(self, tmp_path: Path) -> None:
        assert press_tab("forgectl jobs show ", tmp_path / "none") == [""]
