from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.cli.service.assets import asset
from forged.errors import ConfigError
from forged.systemd.unit import COMMAND, HIDDEN, hidden, is_untouched, stamped, unprotected, with_command

UNIT = asset("systemd", "forged.service").read_text()


def test_with_command_changes_only_the_command() -> None:
    changed = with_command(UNIT, "/opt/forged-1.2+x/bin/forged")
    assert "\nExecStart=/opt/forged-1.2+x/bin/forged run --config /etc/forged/forged.toml\n" in changed
    assert changed.replace("/opt/forged-1.2+x/bin/forged", COMMAND) == UNIT


@pytest.mark.parametrize("command", ["forged", "", "/with space/forged", "/a%b", "/a$b", "/a\nUser=root", '/a"b', "/ä"])
def test_path_that_needs_escaping_in_a_unit_is_refused(command: str) -> None:
    with pytest.raises(ConfigError) as raised:
        with_command(UNIT, command)
    assert raised.value.code == "command_path_unfit"


@pytest.mark.parametrize(
    ("path", "directives"),
    [
        ("/opt/forged/bin/forged", []),
        ("/homestead/forged", []),
        ("/home/me/venv/bin/forged", ["ProtectHome"]),
        ("/root/.pyenv/bin/python", ["ProtectHome"]),
        ("/run/user/1000/forged", ["ProtectHome"]),
        ("/tmp/venv/bin/forged", ["PrivateTmp"]),
        ("/var/tmp/forged", ["PrivateTmp"]),
    ],
)
def test_paths_hidden_by_the_unit_are_found(path: str, directives: list[str]) -> None:
    assert hidden([PurePosixPath("/usr/bin/python3"), PurePosixPath(path)]) == dict.fromkeys(
        directives, PurePosixPath(path)
    )


def test_protections_can_be_removed_separately() -> None:
    assert unprotected(UNIT, []) == UNIT
    changed = unprotected(UNIT, HIDDEN)
    assert "\nProtectHome=read-only\n" in changed
    assert "\nPrivateTmp=no\n" in changed


def test_stamped_text_is_untouched_until_edited() -> None:
    content = stamped(UNIT)
    assert content.endswith(UNIT.encode())
    assert is_untouched(content)
    assert is_untouched(stamped("[Unit]\nDescription=an older one\n"))
    for changed in (content + b"# mine\n", content[:-1], content.replace(b"Restart=", b"#Restart="), UNIT.encode()):
        assert not is_untouched(changed)


@given(st.binary(max_size=200))
def test_text_without_a_stamp_is_not_untouched(content: bytes) -> None:
    assert not is_untouched(content)
