"""Output of `forgectl`: text for people, or one strict JSON object per line for programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forged.cli.forgectl.parser import Options
from forged.errors import PeerError


def answer(options: Options, value: Any, show: Callable[[], object]) -> None:
    """Print a result: as JSON with `--json`, else by `show`."""
    print_json(value) if options.json else show()


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    import json

    def dumps(value: Any) -> str:
        return json.dumps(value, allow_nan=False, default=_text)

    try:
        text = dumps(value)
    except (ValueError, TypeError):
        text = dumps(_representable(value))
    except RecursionError as error:
        raise PeerError("answer_strange", "the reply is nested too deeply for JSON") from error
    print(text)


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _representable(value: Any) -> Any:
    """The value as JSON can represent it: a number that is not finite becomes null, every key a string."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else _text(key): _representable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_representable(one) for one in value]
    return value if not isinstance(value, float) or abs(value) < float("inf") else None
