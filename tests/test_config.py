from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forged.config import _RANGES, DEFAULT_LISTEN, Config, _frozen, load
from forged.errors import ConfigError
from forged.paths import ROOT_DATA_DIR, ROOT_SOCKET, default_data_dir, default_socket

HOME = {"HOME": "/home/me"}
USER = 1000
NOTHING: dict[str, Any] = {}


def read(tmp_path: Path, text: str, **overrides: Any) -> Config:
    path = tmp_path / "forged.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, overrides, HOME, USER)


def problems(tmp_path: Path, text: str, **overrides: Any) -> Sequence[str]:
    """The keys that are wrong."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, **overrides)
    assert caught.value.code == "config_invalid"
    return [problem.key for problem in caught.value.problems]


# What holds.


def test_without_a_file_everything_is_as_it_is_by_default() -> None:
    config = load(None, NOTHING, HOME, USER)
    assert config.listen == (f"tcp://{DEFAULT_LISTEN}",)
    assert (config.data_dir, config.socket) == (
        "/home/me/.local/state/forged",
        "/home/me/.local/state/forged/forged.sock",
    )


def test_a_file_s_settings_stand_over_the_defaults_and_the_flags_over_both(tmp_path: Path) -> None:
    config = read(tmp_path, 'data_dir = "/a"\nsocket = "/a/s"\nsocket_mode = 0o600', data_dir="/b", socket=None)
    assert (config.data_dir, config.socket, config.socket_mode) == ("/b", "/a/s", 0o600)


def test_a_flag_is_checked_like_a_key(tmp_path: Path) -> None:
    assert problems(tmp_path, "", listen=["nowhere"]) == ["listen"]


def test_a_flag_mends_what_the_file_says(tmp_path: Path) -> None:
    assert read(tmp_path, 'listen = ["nowhere"]', listen=["127.0.0.1:0"]).listen == ("127.0.0.1:0",)


def test_lists_are_frozen_and_so_is_the_whole(tmp_path: Path) -> None:
    config = read(tmp_path, 'listen = ["tcp://127.0.0.1:1", "[::1]:2"]')
    assert config.listen == ("tcp://127.0.0.1:1", "[::1]:2")
    with pytest.raises(FrozenInstanceError):
        config.http = "x"  # type: ignore[misc]  # that it is one is the claim


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(None, {"data_dir": "state", "socket": "s"}, HOME, USER)
    assert (config.data_dir, config.socket) == (str(tmp_path / "state"), str(tmp_path / "s"))


def test_a_whole_number_will_do_where_a_number_is_wanted(tmp_path: Path) -> None:
    assert read(tmp_path, "drain_timeout_s = 3").drain_timeout_s == 3


def test_everything_at_once_is_accepted(tmp_path: Path) -> None:
    text = """
        listen = ["tls://0.0.0.0:7433", "tcp://127.0.0.1:0"]
        http = "127.0.0.1:9090"
        tls_certificate = "/c"
        tls_key = "/k"
        tls_client_ca = "/ca"
        unix_other_role = "viewer"
        anonymous_loopback_role = "none"
        [certificate_roles]
        host-a = "operator"
    """
    config = read(tmp_path, text)
    assert (config.certificate_roles, config.anonymous_loopback_role) == ({"host-a": "operator"}, "none")


def test_no_address_means_no_listening_there(tmp_path: Path) -> None:
    config = read(tmp_path, "listen = []\nhttp = ''")
    assert (config.listen, config.http) == ((), "")


# What is wrong.


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    text = """
        data_dire = "/typo"
        socket = 5
        socket_mode = 0o7777
        listen = ["tcp://127.0.0.1:1", "nowhere", "unix:///s"]
        unix_other_role = "boss"
        tls_certificate = "/c"
        hello_timeout_s = true
        [certificate_roles]
        host-a = "none"
    """
    assert problems(tmp_path, text) == [
        *("data_dire", "socket", "socket_mode", "listen", "listen", "unix_other_role", "hello_timeout_s"),
        *("certificate_roles.host-a", "tls_key", "certificate_roles"),
    ]


def test_a_mistake_names_the_file_the_value_and_what_would_be_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "in_flight_max = 0")
    assert str(tmp_path / "forged.toml") in str(caught.value)
    assert "in_flight_max = 0: 1 to 1000000" in str(caught.value)


def test_a_mistake_on_the_command_line_is_said_to_be_there() -> None:
    with pytest.raises(ConfigError, match="the command line"):
        load(None, {"http": "nowhere"}, HOME, USER)


def test_an_unknown_key_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data_dir"):
        read(tmp_path, 'data-dir = "/x"')


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("data_dir = 5", "a text"),
        ("listen = 'x'", "a list of texts"),
        ("listen = [5]", "a list of texts"),
        ("socket_mode = 1.5", "a mode such as 0o660"),
        ("connections_max = '660'", "a whole number"),
        ("connections_max = true", "a whole number"),
        ("drain_timeout_s = '5'", "a number"),
        ("drain_timeout_s = false", "a number"),
        ("certificate_roles = 'operator'", "a table of texts"),
        ("certificate_roles = {a = 5}", "a table of texts"),
    ],
)
def test_a_value_of_another_kind_is_told_which_is_wanted(tmp_path: Path, line: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, line)
    assert caught.value.problems[0].wanted == wanted


@pytest.mark.parametrize("key", _RANGES)
def test_the_ends_of_a_range_are_within_and_what_is_beyond_is_not(tmp_path: Path, key: str) -> None:
    low, high = _RANGES[key]
    for value in (low, high):
        assert getattr(read(tmp_path, f"{key} = {value}"), key) == value
    for value in (low - 1, high + 1):
        assert problems(tmp_path, f"{key} = {value}") == [key]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_none_is_beyond_every_range(tmp_path: Path, value: str) -> None:
    assert problems(tmp_path, f"silence_max_s = {value}") == ["silence_max_s"]


def test_every_number_has_a_range() -> None:
    numbers = {setting.name for setting in fields(Config) if setting.type in ("int", "float")}
    assert set(_RANGES) == numbers


def test_the_defaults_are_valid(tmp_path: Path) -> None:
    defaults = Config()
    for key, (low, high) in _RANGES.items():
        assert low <= getattr(defaults, key) <= high
    assert read(tmp_path, "").listen == defaults.listen


@pytest.mark.parametrize("key", ["unix_other_role", "anonymous_loopback_role"])
@pytest.mark.parametrize(("role", "accepted"), [("none", True), ("worker", True), ("boss", False), ("", False)])
def test_a_role_is_one_that_exists(tmp_path: Path, key: str, role: str, accepted: bool) -> None:
    line = f"{key} = {role!r}"
    if accepted:
        assert getattr(read(tmp_path, line), key) == role
    else:
        assert problems(tmp_path, line) == [key]


@pytest.mark.parametrize("address", ["nowhere", "tcp://host", "http://host:1", "host:99999", ":1", "unix:///s", ""])
def test_where_it_listens_is_a_host_and_a_port(tmp_path: Path, address: str) -> None:
    assert problems(tmp_path, f"listen = [{address!r}]") == ["listen"]
    assert not address or problems(tmp_path, f"http = {address!r}") == ["http"]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("tls_certificate = '/c'", ["tls_key"]),
        ("tls_key = '/k'", ["tls_key"]),
        ("tls_client_ca = '/ca'", ["tls_client_ca"]),
        ("certificate_roles = {a = 'viewer'}", ["certificate_roles"]),
        ("listen = ['tls://0.0.0.0:1']", ["listen"]),
    ],
)
def test_a_tls_setting_without_its_other_half_is_a_mistake(tmp_path: Path, text: str, keys: Sequence[str]) -> None:
    assert problems(tmp_path, text) == keys


def test_http_with_tls_is_refused_because_it_would_be_served_without(tmp_path: Path) -> None:
    text = 'tls_certificate = "c"\ntls_key = "k"\nhttp = "tls://127.0.0.1:1"'
    with pytest.raises(ConfigError, match="host:port or tcp://host:port: it is served as plain HTTP only"):
        read(tmp_path, text)


@pytest.mark.parametrize("value", ["0660", "660", "0o660"])
def test_a_mode_in_quotes_is_told_how_to_write_it(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="0o660, without quotes"):
        read(tmp_path, f'socket_mode = "{value}"')


@pytest.mark.parametrize(("data", "code"), [(b"data_dir = ", "config_not_toml"), (b"\xff\xfe", "config_not_toml")])
def test_what_is_no_toml_is_said_to_be_none(tmp_path: Path, data: bytes, code: str) -> None:
    path = tmp_path / "forged.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load(path, NOTHING, HOME, USER)
    assert caught.value.code == code
    assert str(path) in caught.value.message


@pytest.mark.parametrize("name", ["absent.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / name, NOTHING, HOME, USER)
    assert caught.value.code == "config_unreadable"


# Where things are.


@pytest.mark.parametrize(
    ("environment", "uid", "data_dir", "socket"),
    [
        ({}, 0, ROOT_DATA_DIR, ROOT_SOCKET),
        (HOME, USER, "/home/me/.local/state/forged", "/home/me/.local/state/forged/forged.sock"),
        (HOME | {"XDG_STATE_HOME": "/s"}, USER, "/s/forged", "/s/forged/forged.sock"),
        (HOME | {"XDG_RUNTIME_DIR": "/r"}, USER, "/home/me/.local/state/forged", "/r/forged.sock"),
        (HOME | {"FORGED_SOCKET": "/f"}, USER, "/home/me/.local/state/forged", "/f"),
        ({"FORGED_SOCKET": "/f"}, 0, ROOT_DATA_DIR, "/f"),
        ({}, USER, "/.local/state/forged", "/.local/state/forged/forged.sock"),
    ],
)
def test_the_places_of_a_user(environment: dict[str, str], uid: int, data_dir: str, socket: str) -> None:
    assert (default_data_dir(environment, uid), default_socket(environment, uid)) == (data_dir, socket)


# The file that comes along.

DEFAULTS = Path(__file__).parents[1] / "config" / "forged.toml"


def test_the_file_that_comes_along_is_valid_and_changes_nothing() -> None:
    assert load(DEFAULTS, NOTHING, HOME, USER) == load(None, NOTHING, HOME, USER)


def test_its_commented_settings_are_all_there_are_at_their_defaults() -> None:
    lines = re.findall(r"^# (\w+ = .*)$", DEFAULTS.read_text(), re.MULTILINE)
    told = tomllib.loads("\n".join(lines))
    assert _frozen(told) == {setting.name: getattr(Config(), setting.name) for setting in fields(Config)}
    assert list(told) == [setting.name for setting in fields(Config)]


def test_each_of_its_settings_has_a_line_that_says_what_it_is() -> None:
    lines = DEFAULTS.read_text().splitlines()
    for before, line in pairwise(lines):
        if re.match(r"# \w+ = ", line):
            assert re.match(r"# [A-Z].*\.$", before), line
