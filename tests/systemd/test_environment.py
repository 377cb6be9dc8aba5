from __future__ import annotations

import pytest

from forged.errors import ConfigError
from forged.systemd.environment import take, whole_number


def test_taken_variable_is_removed_from_the_environment() -> None:
    environment = {"A": "1", "B": "2"}
    assert (take(environment, "A"), take(environment, "A")) == ("1", "")
    assert environment == {"B": "2"}


@pytest.mark.parametrize(
    ("text", "number"), [("", None), ("0", 0), ("007", 7), ("18446744073709551615", (1 << 64) - 1)]
)
def test_digits_are_a_number(text: str, number: int | None) -> None:
    assert whole_number("N", text) == number


@pytest.mark.parametrize("text", ["-1", "+1", " 1", "1 ", "1.0", "0x10", "1_0", "٣", "x", "9" * 5000])
def test_text_that_is_no_number_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^N must be a whole number, got ") as raised:
        whole_number("N", text)
    assert raised.value.code == "environment_invalid"
