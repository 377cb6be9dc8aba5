from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from forged.config.model import CHOICES, FRAME_OVERHEAD_BYTES, RANGES, Config, find_problems
from forged.config.redaction import DEPTH_MAX, HIDDEN


def found(**values: Any) -> list[tuple[str, str]]:
    """The keys that are wrong, and what would be right."""
    return [(problem.key, problem.text or problem.wanted) for problem in find_problems(values)]


def keys(**values: Any) -> list[str]:
    """The keys that are wrong."""
    return [key for key, _ in found(**values)]


# Frozen.


def test_config_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().http = "x"  # type: ignore[misc]  # that it is one is the claim


def test_nested_tables_and_lists_are_immutable() -> None:
    config = Config(plugins={"a": {"list": [1, {"b": [2]}], "table": {"c": {}}}}, certificate_roles={"h": "viewer"})
    settings: Any = config.plugins["a"]
    assert settings["list"] == (1, {"b": (2,)})
    tables: list[Any] = [
        config.plugins,
        settings,
        settings["list"][1],
        settings["table"]["c"],
        config.certificate_roles,
    ]
    for table in tables:
        with pytest.raises(TypeError):
            table["x"] = 1


def test_config_does_not_share_its_input() -> None:
    plugins = {"a": {"x": 1}}
    config = Config(plugins=plugins)
    plugins["a"]["x"] = 2
    assert config.plugins == {"a": {"x": 1}}


def test_configs_with_equal_settings_are_equal() -> None:
    def config(value: Any) -> Config:
        return Config(plugins={"a": {"x": [value]}})

    assert config(1) == config(1) == replace(config(2), plugins={"a": {"x": (1,)}})
    assert config(1) != config(2)
    assert Config() == replace(Config())


# What is right.


def test_the_defaults_are_valid() -> None:
    assert keys(**{setting.name: getattr(Config(), setting.name) for setting in fields(Config)}) == []


def test_every_number_has_a_range() -> None:
    assert set(RANGES) == {setting.name for setting in fields(Config) if setting.type in ("int", "float")}


BYTE_LIMITS = ("frame_bytes_max", "connection_bytes_max", "principal_bytes_max", "daemon_bytes_max")
"""Each depends on those before it."""


@pytest.mark.parametrize("key", [key for key in RANGES if key not in BYTE_LIMITS])
def test_range_includes_its_ends_and_nothing_beyond(key: str) -> None:
    low, high = RANGES[key]
    for value in (low, high):
        assert keys(**{key: value}) == []
    for value in (low - 1, high + 1, 10**5000):
        assert keys(**{key: value}) == [key]


@pytest.mark.parametrize("key", BYTE_LIMITS)
def test_byte_limit_outside_its_range_is_refused(key: str) -> None:
    low, high = RANGES[key]
    for value in (low - 1, high + 1, 10**5000):
        assert keys(**{key: value}) == [key]


def test_byte_limits_that_hold_one_message_and_two_principals_are_accepted() -> None:
    connection = (2 << 20) + FRAME_OVERHEAD_BYTES
    fitting = dict(zip(BYTE_LIMITS, (2 << 20, connection, connection, 2 * connection), strict=True))
    assert keys(**fitting) == []
    assert keys(**dict(zip(BYTE_LIMITS, (1 << 30, 1 << 39, 1 << 39, 1 << 40), strict=True))) == []
    for key in BYTE_LIMITS[1:]:
        assert found(**fitting | {key: fitting[key] - 1})[0][0] == key


def test_each_byte_limit_that_is_too_small_is_named_with_its_least_value() -> None:
    frame = 300 << 20
    least = frame + FRAME_OVERHEAD_BYTES
    assert found(frame_bytes_max=frame) == [
        ("connection_bytes_max", f"at least {least}: frame_bytes_max and {FRAME_OVERHEAD_BYTES} more"),
        ("principal_bytes_max", f"at least {least}: the bytes of one connection"),
        ("daemon_bytes_max", f"at least {2 * least}: the bytes of two principals"),
    ]
    assert keys(principal_bytes_max=200 << 20) == ["daemon_bytes_max"]
    assert keys(connection_bytes_max=100 << 20) == ["principal_bytes_max"]
    [problem] = find_problems({"connection_bytes_max": 3 << 20})
    assert str(problem).startswith("connection_bytes_max must be at least 4259840")
    assert str(problem).endswith(f"got {3 << 20}")


@pytest.mark.parametrize("key", [key for key in RANGES if isinstance(getattr(Config(), key), float)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_number_is_outside_every_range(key: str, value: float) -> None:
    assert keys(**{key: value}) == [key]


@pytest.mark.parametrize("key", CHOICES)
def test_unknown_choice_is_refused(key: str) -> None:
    for choice in CHOICES[key]:
        assert keys(**{key: choice}) == []
    for other in ("", "boss", CHOICES[key][0].upper()):
        assert found(**{key: other}) == [(key, f"one of {', '.join(CHOICES[key])}")]


# What is wrong.


@pytest.mark.parametrize("key", RANGES)
@pytest.mark.parametrize("value", ["x", True, [], {}])
def test_error_for_a_non_number_names_the_range(key: str, value: Any) -> None:
    low, high = RANGES[key]
    ends = "0o0 to 0o777" if key == "socket_mode" else f"{low} to {high}"
    [(_, wanted)] = found(**{key: value})
    assert wanted.endswith(ends)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("data_dir", 5, "a text"),
        ("data_dir", "/a\0b", "a text without zero bytes"),
        ("listen", "x", "a list of texts"),
        ("listen", [5], "a list of texts"),
        ("socket_mode", 1.5, "a mode such as 0o660, 0o0 to 0o777"),
        ("socket_mode", "0660", "0o660, without quotes"),
        ("socket_mode", "660", "0o660, without quotes"),
        ("socket_mode", "0o660", "0o660, without quotes"),
        ("socket_mode", "rw", "a mode such as 0o660, 0o0 to 0o777"),
        ("connections_max", "660", "a whole number, 1 to 1000000"),
        ("connections_max", 1.5, "a whole number, 1 to 1000000"),
        ("drain_timeout_s", "5", "a number, 0 to 3600"),
        ("drain_timeout_s", -1, "0 to 3600"),
        ("log_level", 5, "one of debug, info, warning, error"),
        ("certificate_roles", "operator", "a table"),
        ("plugins", ["webhook"], "a table"),
    ],
)
def test_error_for_a_wrong_type_names_the_expected_type(key: str, value: Any, wanted: str) -> None:
    assert found(**{key: value}) == [(key, wanted)]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("data-dir", "data_dir"),
        ("data_dire", "data_dir"),
        ("Drain_Timeout", "drain_timeout_s"),
        ("plugin", "plugins"),
        ("loglevel", "log_level"),
    ],
)
def test_error_for_a_mistyped_key_names_the_nearest_key(key: str, nearest: str) -> None:
    assert found(**{key: "x"}) == [(key, f"unknown key `{key}`; did you mean `{nearest}`?")]


def test_error_for_an_unknown_key_lists_all_keys() -> None:
    [(_, wanted)] = found(zebra=1)
    assert all(setting.name in wanted for setting in fields(Config))


@pytest.mark.parametrize(
    "address", ["nowhere", "tcp://host", "http://host:1", "host:99999", ":1", "unix:///s", "", "a b:1", "a\0b:1"]
)
def test_listen_address_needs_host_and_port(address: str) -> None:
    assert keys(listen=[address]) == ["listen"]
    assert not address or keys(http=address) == ["http"]


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"tls_certificate": "/c"}, ["tls_certificate"]),
        ({"tls_key": "/k"}, ["tls_key"]),
        ({"tls_client_ca": "/ca"}, ["tls_client_ca"]),
        ({"certificate_roles": {"a": "viewer"}}, ["certificate_roles"]),
        ({"listen": ["tls://0.0.0.0:1"]}, ["listen"]),
        ({"tls_certificate": "/c", "tls_key": "/k", "listen": ["tls://0.0.0.0:1"]}, []),
    ],
)
def test_tls_certificate_and_key_are_required_together(settings: dict[str, Any], wrong: list[str]) -> None:
    assert keys(**settings) == wrong


def test_http_address_with_tls_scheme_is_refused() -> None:
    [(_, wanted)] = found(tls_certificate="c", tls_key="k", http="tls://127.0.0.1:1")
    assert wanted == "host:port or tcp://host:port, because it is plain HTTP"


@pytest.mark.parametrize("role", ["none", "boss", "", 5, ["viewer"], {}])
def test_certificate_role_must_grant_access(role: object) -> None:
    settings = {"certificate_roles": {"host.a": role}, "tls_client_ca": "/ca", "tls_certificate": "c", "tls_key": "k"}
    assert found(**settings) == [("certificate_roles.host.a", "one of viewer, worker, operator")]


@pytest.mark.parametrize("table", ["certificate_roles", "plugins"])
def test_error_for_a_setting_below_a_table_names_its_right_place(table: str) -> None:
    [(key, wanted), *_] = found(**{table: {"log_level": "debug"}})
    assert key == f"{table}.log_level"
    assert wanted.endswith(" (settings of the daemon stand above the first [table])")


# Plugins.


@pytest.mark.parametrize("name", ["a", "web-hook", "event_log", "a9", "a" * 64])
def test_a_plugin_has_settings_of_any_kind(name: str) -> None:
    settings = {"enabled": False, "x": [1, 2.5, {"y": True}], "big": 2**64 - 1, "small": -(2**63), "text": "t"}
    assert keys(plugins={name: settings}) == []


@pytest.mark.parametrize("name", ["", "A", "9a", "_a", "a.b", "a b", "a" * 65, "ä", "a\n"])
def test_error_for_an_invalid_plugin_name_describes_valid_names(name: str) -> None:
    [(key, wanted)] = found(plugins={name: {}})
    assert key == f"plugins.{name}"
    assert "a to z" in wanted


@pytest.mark.parametrize("value", ["x", 5, [{}], True])
def test_plugin_settings_must_be_a_table(value: object) -> None:
    assert found(plugins={"a": value}) == [("plugins.a", "a table with the settings of this plugin")]


@pytest.mark.parametrize("value", ["yes", 1, 0, [], {}])
def test_plugin_enabled_must_be_a_boolean(value: object) -> None:
    assert found(plugins={"a": {"enabled": value}}) == [("plugins.a.enabled", "true or false")]


@pytest.mark.parametrize(
    ("value", "key", "wanted"),
    [
        (float("nan"), "plugins.a.x", "a finite number"),
        ([1.0, float("inf")], "plugins.a.x", "a finite number"),
        ({"y": {"z": 2**64}}, "plugins.a.x.y.z", "a whole number of 64 bits"),
        (-(2**63) - 1, "plugins.a.x", "a whole number of 64 bits"),
    ],
)
def test_plugin_number_that_cannot_be_encoded_is_refused(value: object, key: str, wanted: str) -> None:
    assert found(plugins={"a": {"x": value}}) == [(key, wanted)]


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_settings_that_are_nested_too_deep_are_refused(wrap: Any) -> None:
    deep: Any = 1
    for _ in range(DEPTH_MAX):
        deep = wrap(deep)
    assert keys(plugins={"p": {"x": deep}}) == []
    for _ in range(100_000):
        deep = wrap(deep)
    [(key, wanted)] = found(plugins={"p": {"x": deep}})
    assert key.startswith("plugins.p.x")
    assert f"{DEPTH_MAX} levels deep" in wanted


@pytest.mark.parametrize(
    "values",
    [
        {"plugin": {"webhook": {"secret": "hush"}}},
        {"webhook_secret": "hush"},
        {"plugins": {"Web Hook": {"secret": "hush"}}},
        {"plugins": {"token": "hush"}},
        {"plugins": {"a": [{"password": "hush"}]}},
        {"plugins": {"a": {"enabled": {"key": "hush"}}}},
    ],
)
def test_problems_do_not_contain_secret_text(values: dict[str, Any]) -> None:
    [problem] = find_problems(values)
    assert "hush" not in str(problem)
    assert HIDDEN in repr(problem.value)


def test_problems_do_not_contain_secret_numbers() -> None:
    [problem] = find_problems({"plugins": {"a": {"token": 2**70}}})
    assert problem.value == HIDDEN
