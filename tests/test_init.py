from __future__ import annotations

import forged


def test_every_public_name_is_there() -> None:
    assert [name for name in forged.__all__ if not hasattr(forged, name)] == []


def test_there_is_no_name_that_is_not_public() -> None:
    assert not hasattr(forged, "nothing")
