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


def press_tab(line: str, socket: Path, point: int | None = None, breaks: str = " \t\n\"'@><=;|&(:") -> list[str]:
    """The candidates that bash receives for a line, and the `compopt` calls."""
    environment = os.environ | {"FORGED_SOCKET": str(socket), "PATH": f"{BIN}:{os.environ['PATH']}"}
    script = f"COMP_WORDBREAKS={shlex.quote(breaks)}\n{PRESS_TAB}"
    bash_command = ["bash", "-c", script, "bash", line, *([] if point is None else [str(point)])]
    done = subprocess.run(bash_command, env=environment, cwd=socket.parent, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("shell", SCRIPTS)
def test_script_is_printed_without_a_daemon(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGED_SOCKET", "/none")
    assert main.main(["completion", shell]) == 0
    assert capsys.readouterr().out == SCRIPTS[shell]
    assert main.main(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shell": shell, "script": SCRIPTS[shell]}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_script_is_valid_for_its_shell(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    done = subprocess.run([shell, "-n"], input=SCRIPTS[shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


class TestBash:
    @pytest.mark.parametrize(
        ("line", "offered"),
        [
            ("forgectl sta", ["status"]),
            ("forgectl jobs r", ["rm", "resume", "reopen", "rescale"]),
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

    def test_only_the_text_before_the_cursor_is_completed(self, tmp_path: Path) -> None:
        assert press_tab("forgectl st ping", tmp_path / "none", point=len("forgectl st")) == ["status", "story"]

    def test_candidates_are_whole_words_when_bash_splits_only_at_blanks(self, tmp_path: Path) -> None:
        offered = press_tab("forgectl tokens create x --role=w", tmp_path / "none", breaks=" \t\n")
        assert offered == ["--role=worker"]

    def test_directory_is_completed_without_a_space(self, tmp_path: Path) -> None:
        (tmp_path / "state").mkdir()
        assert press_tab("forgectl backup st", tmp_path / "none") == ["compopt -o nospace", "state/"]

    def test_name_after_an_at_sign_is_completed(self, tmp_path: Path) -> None:
        """Bash replaces only what follows the sign."""
        models = [{"model_id": "resnet", "versions": 2, "aliases": {"serving": [1, 0, 0]}}]
        versions = [{"version": [1, 10, 0], "state": "canary"}, {"version": [1, 0, 0], "state": "production"}]
        replies = {"ListModels": {"models": models}, "ListModelVersions": {"versions": versions}}
        with scripted_daemon(tmp_path, replies) as daemon:
            assert press_tab("forgectl models show r", daemon.path) == ["compopt -o nospace", "resnet@"]
            assert press_tab("forgectl models show resnet@1.", daemon.path) == ["1.10.0", "1.0.0"]

    def test_special_characters_in_file_names_are_quoted(self, tmp_path: Path) -> None:
        (tmp_path / "x$(touch ran)").touch()
        assert press_tab("forgectl backup x", tmp_path / "none") == [r"x\$\(touch\ ran\)"]
        assert not (tmp_path / "ran").exists()

    def test_completion_without_a_daemon_prints_no_error(self, tmp_path: Path) -> None:
        assert press_tab("forgectl jobs show ", tmp_path / "none") == [""]
