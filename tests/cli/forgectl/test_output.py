"""JSON output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forged.cli.forgectl.output import print_json

INFINITE = float("inf")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"fact": [{"loss": float("nan"), "lr": INFINITE}, 1.5]}, {"fact": [{"loss": None, "lr": None}, 1.5]}),
        ({"secret": b"\x01\xff"}, {"secret": "01ff"}),
        ({1: "a", b"\x01": -INFINITE, None: []}, {"1": "a", "01": None, "None": []}),
        ({"text": "\ud800 \x1b"}, {"text": "\ud800 \x1b"}),
    ],
)
def test_any_value_has_a_json_form(value: Any, said: Any, capsys: pytest.CaptureFixture[str]) -> None:
    print_json(value)
    text = capsys.readouterr().out
    assert text.isascii()
    assert text.count("\n") == 1
    assert json.loads(text, parse_constant=pytest.fail) == said
