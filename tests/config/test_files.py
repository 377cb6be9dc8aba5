"""The shipped settings files."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from forged.config import Config, load
from forged.config.lines import key_lines
from forged.config.model import CHOICES, RANGES
from forged.config.reload import LIVE
from forged.net.transport.port import Address
from tests.config.files import HOME, NOTHING, USER

ROOT = Path(__file__).parents[2]
DEFAULTS = ROOT / "config" / "forged.toml"
PRODUCTION = ROOT / "config" / "production.toml"
OPERATIONS = ROOT / "docs" / "operations.md"
NAMES = [setting.name for setting in fields(Config)]
SETTING = r"^# (\w+ = .*|\[plugins\])$"


def test_the_shipped_settings_file_is_valid_and_equals_the_defaults() -> None:
    assert load(DEFAULTS, NOTHING, HOME, USER) == load(None, NOTHING, HOME, USER)


def test_the_shipped_file_lists_every_setting_with_its_default() -> None:
    told = tomllib.loads("\n".join(re.findall(SETTING, DEFAULTS.read_text(), re.MULTILINE)))
    assert Config(**told) == Config()
    assert list(told) == NAMES


def test_each_setting_of_the_shipped_file_has_a_describing_comment() -> None:
    for before, line in pairwise(DEFAULTS.read_text().splitlines()):
        if re.match(r"# (\w+ = |\[)", line):
            assert re.match(r"# [A-Z].*\.$", before), line


def test_the_shipped_file_is_valid_with_all_settings_uncommented(tmp_path: Path) -> None:
    path = tmp_path / "forged.toml"
    path.write_text(re.sub(r"^# (?=\w+ = |\[|  )", "", DEFAULTS.read_text(), flags=re.MULTILINE))
    config = load(path, NOTHING, HOME, USER)
    assert set(config.plugins) == {"webhook", "event_log"}
    assert {"url", "secret_file", "types"} <= set(config.plugins["webhook"])
    assert {"path", "bytes_max", "files_max"} <= set(config.plugins["event_log"])


def test_the_production_example_is_valid() -> None:
    config = load(PRODUCTION, NOTHING, {}, 0)
    assert [Address.parse(address).scheme for address in config.listen] == ["tls"]
    assert config.tls_client_ca
    assert set(config.certificate_roles.values()) == {"worker", "viewer", "operator"}
    assert (config.anonymous_loopback_role, config.own_user_loopback_role) == ("none", "none")
    assert config.unix_other_role == "operator"
    assert set(config.plugins) == {"webhook", "event_log"}


def test_each_setting_of_the_production_example_has_a_comment() -> None:
    lines = PRODUCTION.read_text().splitlines()
    blocks = "\n".join(lines).split("\n\n")
    for block in blocks:
        assert block.startswith("# "), block
    assert len(key_lines(PRODUCTION.read_text())) > 20


@pytest.mark.parametrize("key", [*RANGES, *CHOICES])
def test_operations_page_lists_the_range_of_each_setting(key: str) -> None:
    [row] = re.findall(rf"^\| `{key}` \|.*$", OPERATIONS.read_text(), re.MULTILINE)
    if key in RANGES:
        low, high = RANGES[key]
        assert (f"| {low} to {high} |" if key != "socket_mode" else "| 0o0 to 0o777 |") in row
    elif not key.endswith("_role"):
        assert f"| {', '.join(CHOICES[key])} |" in row


def test_operations_page_lists_the_reloadable_settings() -> None:
    [sentence] = re.findall(r"These settings change at once: (.*?)\. ", OPERATIONS.read_text(), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == LIVE
