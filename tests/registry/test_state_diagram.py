"""The diagram of a version's states in the documentation."""

from __future__ import annotations

from tests.registry.state_diagram import diagram, drawn


def test_page_has_the_diagram_of_the_table() -> None:
    assert drawn() == diagram(), "run `python -m tests.registry.state_diagram`"


def test_diagram_shows_the_way_to_production_and_back() -> None:
    assert "    canary --> production\n    canary --> staging : rollback\n" in diagram()
    assert diagram().count("-->") == 11
