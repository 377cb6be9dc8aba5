"""What can go wrong, by whose fault it is.

Law: every error that leaves `forged` is a `ForgedError` with a machine-readable `code`, a sentence, and the fix. It is
translated once, at the edge where foreign code raises it; inside, nobody catches it to raise another.
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
    """The base of every error of forged: `code` for programs, `message` and `fix` for people."""

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
    """What somebody else's code raised, in words that are short and can be stored, whatever it is."""
    if isinstance(error, ForgedError):
        text = str(error)
    else:
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - an exception's own `__str__` is somebody else's code too
            text = f"{type(error).__name__}, which cannot be shown"
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
    """A key as it is, unless somebody wrote one that would upset a terminal or fill it."""
    return key if key.isprintable() and len(key) <= VALUE_CHARS_MAX else _in_brief(key)


def _in_brief(value: object) -> str:
    """A value as Python writes it, cut to what people read."""
    try:
        text = _brief.repr(value)
    except (ValueError, RecursionError):
        # A number with more digits than Python writes, or nesting without end.
        text = f"a {type(value).__name__} too large to be shown"
    return text if len(text) <= VALUE_CHARS_MAX * 2 else f"{text[: VALUE_CHARS_MAX * 2]}..."


class ConfigError(ForgedError):
    """The operator's to mend: a setting, a file, a directory. Names every problem at once."""

    kind = "config"

    def __init__(self, code: str, message: str, fix: str = "", problems: Iterable[Problem] = ()) -> None:
        super().__init__(code, message, fix)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n  ".join([super().__str__(), *map(str, self.problems)])


class RequestRefused(ForgedError):
    """The caller's to mend: the request was understood, and changes nothing."""

    kind = "refused"


class PeerError(ForgedError):
    """The other end broke the protocol; the connection to it is closed."""

    kind = "peer"


class Unavailable(ForgedError):
    """The world's fault, and passing: the same request may be sent again."""

    kind = "unavailable"
    retryable = True


class NotLeader(Unavailable):
    """Another daemon leads; the client turns to its next endpoint."""


KINDS: dict[str, type[ForgedError]] = {
    cls.kind: cls for cls in (ForgedError, ConfigError, RequestRefused, PeerError, Unavailable)
}


def from_wire(kind: str, code: str, message: str, fix: str) -> ForgedError:
    """The error that a peer reported; an unknown kind, from a newer peer, is a plain `ForgedError`."""
    if code == "not_leader":
        return NotLeader(code, message, fix)
    return KINDS.get(kind, ForgedError)(code, message, fix)


def without_traceback(error: ForgedError) -> ForgedError:
    """An error that many will meet, without the frames of those who met it before: they would never be let go."""
    return error.with_traceback(None)
