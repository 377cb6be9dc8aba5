"""`forged check-config`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forged.cli import forged

BAD_CONFIG = """
listen = ["nowhere"]
drain_timeout_s = -1
colour = "blue"
unix_other_role = "king"
frame_bytes_max = "large"
tls_certificate = "cert.pem"
"""
BAD_KEYS = ("listen", "drain_timeout_s", "colour", "unix_other_role", "frame_bytes_max", "tls_certificate")


def test_valid_config_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "forged.toml"
    path.write_text('listen = ["tcp://127.0.0.1:0"]\n')
    assert forged.main(["check-config", str(path)]) == 0
    assert capsys.readouterr().out == f"{path} is valid\n"


def test_all_errors_are_listed_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "forged.toml"
    path.write_text(BAD_CONFIG)
    assert forged.main(["check-config", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"forged: {path} is not a valid configuration")
    problems = [line.partition(": ")[2].removeprefix("unknown key `") for line in error.splitlines()[1:]]
    assert {re.split("[ `]", problem)[0] for problem in problems} == set(BAD_KEYS)


@pytest.mark.parametrize(("text", "reason"), [("listen = [", "TOML"), (None, "No such file")])
def test_unreadable_config_names_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, reason: str
) -> None:
    path = tmp_path / "forged.toml"
    if text is not None:
        path.write_text(text)
    assert forged.main(["check-config", str(path)]) == 2
    assert reason in capsys.readouterr().err


def test_missing_certificates_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "forged.toml"
    path.write_text('tls_certificate = "/none/cert.pem"\ntls_key = "/none/key.pem"\n')
    assert forged.main(["check-config", str(path)]) == 2
    error = capsys.readouterr().err
    assert "cannot read tls_certificate '/none/cert.pem': No such file" in error
    assert "cannot read tls_key '/none/key.pem': No such file" in error
