from __future__ import annotations

from datetime import date, datetime, time, timezone
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from forged.config.redaction import DEPTH_MAX, HIDDEN, redacted


@pytest.mark.parametrize("key", ["secret", "client_secret", "Password", "API_TOKEN", "key", "keys", "secret_file"])
@pytest.mark.parametrize("value", ["x", 5, ["x"], {"a": "x"}])
def test_possible_secret_of_any_type_is_hidden(key: str, value: Any) -> None:
    settings = {"webhook": {"url": "u", "inner": [{key: value}], key: value}}
    assert redacted(settings) == {"webhook": {"url": "u", "inner": [{key: HIDDEN}], key: HIDDEN}}


def test_frozen_settings_become_plain_ones() -> None:
    assert redacted(MappingProxyType({"a": (1, MappingProxyType({"b": (2,)}))})) == {"a": [1, {"b": [2]}]}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (datetime(2024, 1, 2, 3, 4, tzinfo=timezone.utc), "2024-01-02T03:04:00+00:00"),  # noqa: UP017 - as tomllib does
        (date(2024, 1, 2), "2024-01-02"),
        (time(3, 4), "03:04:00"),
        ("caf\udce9", "caf\\udce9"),
    ],
)
def test_value_that_cannot_be_encoded_becomes_text(value: object, text: str) -> None:
    assert redacted(value) == text
    assert msgspec.msgpack.encode(redacted({"x": value}))


def test_key_that_cannot_be_encoded_is_replaced() -> None:
    assert redacted({"\udce9": 1}) == {"\\udce9": 1}


def test_value_nested_too_deep_is_not_shown() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = {"a": [deep]}
    told = redacted(deep)
    for _ in range(DEPTH_MAX // 2):
        told = told["a"][0]
    assert told == {"a": "..."}
