"""The silent log."""

from __future__ import annotations

import pytest

from forged.log import LEVELS, SILENT


@pytest.mark.parametrize("level", LEVELS)
def test_silent_log_accepts_and_discards_every_event(level: str) -> None:
    assert not SILENT.hears(level)
    getattr(SILENT.bind(peer="a"), level)("an event", field=object())


def test_the_levels_are_in_order() -> None:
    assert list(LEVELS) == sorted(LEVELS, key=LEVELS.__getitem__)
