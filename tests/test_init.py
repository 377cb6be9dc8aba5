from __future__ import annotations

import forged


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in forged.__all__ if not hasattr(forged, name)] == []


def test_package_has_no_undeclared_names() -> None:
    assert not hasattr(forged, "nothing")
