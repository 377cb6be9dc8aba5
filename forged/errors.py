"""The error classes of forged, by the party that can fix the error.

Invariants:
- Every error that leaves `forged` is a `ForgedError` with a machine-readable `code`, a message and a fix.
- Errors of other libraries are translated once, where they are raised; a `ForgedError` is not translated again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from reprlib import Repr

DESCRIPTION_CHARS_MAX = 2_000
VALUE_CHARS_MAX = 200

_brief = Repr()
_brief.maxlevel = 4
_brief.maxdict = _brief.maxlist = _brief.maxtuple = 20
_brief.maxstring = _brief.maxlong = _brief.maxother = VALUE_CHARS_MAX


class ForgedError(Exception):
    """The base of all errors: `code` for programs, `message` and `fix` for people."""

    kind = "internal"
    retryable = False

    def __init__(self, code: str, message: str, fix: str = "") -> None:
        super().__init__(code, message, fix)
        self.code = code
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message


def describe(error: BaseException) -> str:
    """A short, storable description of any exception."""
    if isinstance(error, ForgedError):
        text = str(error)
    else:
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - the exception's `__str__` may raise
            text = f"{type(error).__name__} (its text cannot be shown)"
    return text.encode(errors="backslashreplace").decode()[:DESCRIPTION_CHARS_MAX]


@dataclass(frozen=True, slots=True)
class Problem:
    """One invalid input value; it reads `KEY must be WANTED, got VALUE`, or as `text` says where that does not fit.

    `line` is the key's line in a file; `place` says where the key was set when that is not a file.
    """

    key: str
    value: object
    wanted: str = ""
    line: int | None = None
    place: str = ""
    text: str = ""

    @classmethod
    def unknown(cls, key: str, value: object, known: Iterable[str], nearest: str | None) -> Problem:
        """A key that is none of the known ones; `nearest` is the one that the caller may have meant."""
        hint = f"did you mean `{nearest}`?" if nearest else f"the known keys are {', '.join(known)}"
        return cls(key, value, text=f"unknown key `{_legible(key)}`; {hint}")

    def __str__(self) -> str:
        place = self.place if self.line is None else f"line {self.line}"
        text = self.text or f"{_legible(self.key)} must be {self.wanted}, got {_in_brief(self.value)}"
        return f"{place}: {text}" if place else text


def _legible(key: str) -> str:
    """A key as it is, or its repr if it is long or has control characters."""
    return key if key.isprintable() and len(key) <= VALUE_CHARS_MAX else _in_brief(key)


def _in_brief(value: object) -> str:
    """The repr of a value, shortened."""
    try:
        text = _brief.repr(value)
    except (ValueError, RecursionError):
        # An integer with too many digits, or recursive nesting.
        text = f"a {type(value).__name__} too large to be shown"
    return text if len(text) <= VALUE_CHARS_MAX * 2 else f"{text[: VALUE_CHARS_MAX * 2]}..."


class ConfigError(ForgedError):
    """The operator must fix a setting, file or directory. Names all problems at once."""

    kind = "config"

    def __init__(self, code: str, message: str, fix: str = "", problems: Iterable[Problem] = ()) -> None:
        super().__init__(code, message, fix)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *map(str, self.problems)])


class RequestRefused(ForgedError):
    """The caller must change the request. The request was understood and changed nothing."""

    kind = "refused"


class PeerError(ForgedError):
    """The peer violated the protocol; the connection is closed."""

    kind = "peer"


class Unavailable(ForgedError):
    """A temporary condition: the same request may be sent again."""

    kind = "unavailable"
    retryable = True


class NotLeader(Unavailable):
    """Another daemon owns the store; the client tries its next endpoint."""


KINDS: dict[str, type[ForgedError]] = {
    cls.kind: cls for cls in (ForgedError, ConfigError, RequestRefused, PeerError, Unavailable)
}


def from_wire(kind: str, code: str, message: str, fix: str) -> ForgedError:
    """The error that a peer reported; a plain `ForgedError` for an unknown kind from a newer peer."""
    if code == "not_leader":
        return NotLeader(code, message, fix)
    return KINDS.get(kind, ForgedError)(code, message, fix)


def without_traceback(error: ForgedError) -> ForgedError:
    """A shared error without its traceback: otherwise each raise would keep further frames alive."""
    return error.with_traceback(None)
