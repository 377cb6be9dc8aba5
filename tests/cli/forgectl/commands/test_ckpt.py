"""`forgectl ckpt`: its arguments, and the behaviour of all its commands."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import forged.checkpoint
from forged.checkpoint.model import CheckpointFormat, CompressionLevel
from forged.cli.forgectl import main
from forged.cli.forgectl.commands import ckpt
from tests.checkpoint.fixtures.s3_server import S3Server

Caught = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.mark.parametrize(
    "line",
    [
        "nonsense", "ls a b", "show", "show a b", "verify", "diff a", "cat a", "cat a b --rank x", "cat a b --rank -1",
        "convert a", "convert a b --format zip", "rm", "diff a b --socket /x", "diff a b --endpoint tcp://h:1",
        "verify a --timeout 0", "show a --tensors", "cat a b --out", "gc", "pin a", "pin --job a", "adopt a",
        "estimate a", "compact", "restore-point", "restore-point --job a --max-step -1",
        "restore-point --job a --max-epoch x",
    ],
)  # fmt: skip
def test_wrong_usage_exits_with_2_and_prints_usage(line: str, capsys: Caught) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["ckpt", *line.split()])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: forgectl ")


def test_wrong_usage_is_json_with_the_json_option(capsys: Caught) -> None:
    assert main.main(["ckpt", "show", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "usage_wrong"


def test_daemon_options_before_the_command_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Caught
) -> None:
    monkeypatch.setenv("FORGED_SOCKET", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert main.main(["--socket", "/nowhere", "--json", "ckpt", "ls", "."]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"] == []


@pytest.mark.parametrize(
    ("line", "asks_a_daemon"), [("", True), ("ls", True), ("gc", True), ("verify", True), ("diff", False)]
)
def test_help_lists_daemon_options_where_a_daemon_can_be_asked(line: str, asks_a_daemon: bool, capsys: Caught) -> None:
    with pytest.raises(SystemExit):
        main.main(["ckpt", *line.split(), "--help"])
    said = capsys.readouterr().out
    assert "--json" in said
    assert ("--socket" in said) == asks_a_daemon


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ls a --job b", "a path and --job are both given"),
        ("ls --follow", "--follow needs --job"),
        ("show a --job b --tensors c", "--tensors and --job are both given"),
        ("rm a --job b --unfinished", "--unfinished and --job are both given"),
    ],
)
def test_options_of_the_other_form_are_refused(line: str, said: str, capsys: Caught) -> None:
    assert main.main(["ckpt", *line.split()]) == 2
    assert said in capsys.readouterr().err


def test_choices_match_the_checkpoint_engine() -> None:
    assert tuple(CheckpointFormat) == ckpt.FORMATS
    assert tuple(CompressionLevel) == ckpt.COMPRESSIONS


def test_parsing_does_not_import_the_checkpoint_engine() -> None:
    program = (
        "import sys; from forged.cli.forgectl import main; main._parsed(['ckpt', 'show', 'x', '--job', 'y']); "
        "sys.exit({'numpy', 'asyncio', 'anyio', 'msgspec', 'forged.checkpoint'} & {*sys.modules} != set())"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_closed_output_ends_the_command(tmp_path: Path) -> None:
    forged.checkpoint.save(str(tmp_path / "a"), {f"w{number}": np.zeros(1) for number in range(20_000)})
    command = [sys.executable, "-m", "forged.cli.forgectl.main", "ckpt", "show", str(tmp_path / "a")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as showing:
        assert showing.stdout is not None
        assert showing.stderr is not None
        assert showing.stdout.readline().startswith(b"prefix")
        showing.stdout.close()
        assert showing.wait(timeout=60) == 0
        assert showing.stderr.read() == b""


class TestBucket:
    @pytest.fixture
    def url(self, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        return f"s3://{s3.bucket()}/runs"

    def run(self, line: str, capsys: Caught) -> tuple[int, str, str]:
        code = main.main(["ckpt", *shlex.split(line)])
        said = capsys.readouterr()
        return code, said.out, said.err

    def test_every_command_accepts_a_url(
        self, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Caught
    ) -> None:
        monkeypatch.chdir(tmp_path)
        state = {"model": {"w": np.arange(1 << 20, dtype=np.float32)}, "step": 7}
        forged.checkpoint.save(f"{url}/7/a", state)
        code, out, err = self.run(f"ls {url}", capsys)
        assert (code, err) == (0, "")
        assert out.splitlines()[1].startswith("7/a ")
        assert self.run(f"show {url}/7/a", capsys)[1].startswith("prefix   a\nurl      s3://")
        assert self.run(f"verify {url}/7/a", capsys)[1].startswith("a is valid: 1 tensor in 1 file, 4.19 MB compared")
        assert self.run(f"cat {url}/7/a model/w --out w.npy", capsys)[0] == 0
        assert np.array_equal(np.load("w.npy"), state["model"]["w"])  # type: ignore[index]
        assert self.run(f"convert {url}/7/a local --format consolidated", capsys)[0] == 0
        assert self.run(f"convert local {url}/b --compression fast", capsys)[0] == 0
        assert self.run(f"diff {url}/b local", capsys)[:2] == (
            0,
            "1 tensor, all the same; 1 value, all the same\n",
        )
        assert self.run(f"rm {url}/7/a --yes", capsys)[0] == 0
        assert [row["prefix"] for row in json.loads(self.run(f"ls {url} --json", capsys)[1])["checkpoints"]] == ["b"]

    def test_missing_checkpoint_and_bucket_have_exit_and_error_codes(self, url: str, capsys: Caught) -> None:
        assert self.run(f"show {url}/none", capsys)[0] == 3
        code, _, err = self.run("ls s3://no-such-bucket/x --json", capsys)
        assert (code, json.loads(err)["error"]["code"]) == (2, "checkpoint_bucket_missing")

    def test_missing_permission_exits_with_2(self, url: str, monkeypatch: pytest.MonkeyPatch, capsys: Caught) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        code, _, err = self.run(f"ls {url} --json", capsys)
        assert (code, json.loads(err)["error"]["code"]) == (2, "checkpoint_storage_denied")

    def test_unresponsive_server_times_out_after_the_given_time(
        self, url: str, monkeypatch: pytest.MonkeyPatch, capsys: Caught
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
            code, _, err = self.run(f"ls {url} --timeout 0.3 --json", capsys)
        assert (code, json.loads(err)["error"]["code"]) == (4, "checkpoint_timeout")

    @pytest.mark.parametrize("verb", ["ls", "show", "verify"])
    def test_interrupted_wait_exits_with_130_and_no_output(
        self, url: str, monkeypatch: pytest.MonkeyPatch, verb: str
    ) -> None:
        command = [sys.executable, "-m", "forged.cli.forgectl.main", "ckpt", verb, f"{url}/a"]
        with socket.create_server(("127.0.0.1", 0)) as silent:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
                guest, _ = silent.accept()
                with guest:
                    waiting.send_signal(signal.SIGINT)
                    out, err = waiting.communicate(timeout=30)
        assert (waiting.returncode, out, err) == (130, b"", b"")
