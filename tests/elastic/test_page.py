"""docs/elastic.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from forged.elastic.config import DEFAULTS
from forged.elastic.phases import TRANSITIONS

PAGE = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text()


def test_the_picture_shows_every_transition_and_no_other() -> None:
    drawn = re.findall(r"^    (\w+) --> (\w+): (.+)$", PAGE, re.MULTILINE)
    assert sorted(drawn) == sorted(
        (str(phase), str(after), cause.value) for (phase, cause), after in TRANSITIONS.items()
    )


def test_every_setting_stands_there_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (`[^`]*`|) \|", PAGE, re.MULTILINE))
    assert rows.keys() == DEFAULTS.keys()
    shown = {
        name: "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"
        for name, value in DEFAULTS.items()
    }
    assert rows == shown
