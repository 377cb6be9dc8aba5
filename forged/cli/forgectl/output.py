"""How `forgectl` answers.

Law: programs get one JSON object a line, strict JSON whatever the daemon said; people get words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forged.cli.forgectl.parser import Options
from forged.errors import PeerError


def answer(options: Options, value: Any, show: Callable[[], object]) -> None:
    """The answer, to whoever asked."""
    print_json(value) if options.json else show()


def print_json(value: Any) -> None:
    """One line of JSON."""
    import json

    def say(value: Any) -> str:
        return json.dumps(value, allow_nan=False, default=_text)

    try:
        text = say(value)
    except (ValueError, TypeError):
        text = say(_sayable(value))
    except RecursionError as error:
        raise PeerError("answer_strange", "what was answered is nested too deeply for JSON") from error
    print(text)


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _sayable(value: Any) -> Any:
    """What JSON can say of it: a number that is none, from a plugin's fact, is null; every key is a text."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else _text(key): _sayable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_sayable(one) for one in value]
    return value if not isinstance(value, float) or abs(value) < float("inf") else None
