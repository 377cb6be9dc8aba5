"""Reads plain values from a pickle: no class is looked up, and nothing is called but functions that the reader gives.

Invariants:
- Dicts, lists, tuples, texts, bytes, numbers, booleans and None are read; every other operation is refused.
- A class or function that the pickle names is replaced by the reader's own function of that name, or refused.
- The memory needed is bounded by the size of the file and by `VALUES_MAX`; nesting needs no stack of calls.
- An error names the position of the operation.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

VALUES_MAX = 20_000_000
"""Operations that make a value."""
_ARGUMENTS = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    }
)
"""Operations whose argument is the value."""
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], object]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset({"PROTO", "FRAME"})


class PickleRefused(ValueError):
    """A pickle is damaged, too large, or has more than plain values."""

    def __init__(self, position: int, problem: str, *, is_too_large: bool = False) -> None:
        super().__init__(f"byte {position}: {problem}")
        self.position = position
        self.problem = problem
        self.is_too_large = is_too_large


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """What stands for a class or a function that a pickle names."""

    name: str
    call: Callable[..., Any]


class Record:
    """What stands for an object of a class: its state, which is any plain value."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None


def read_pickle(
    data: bytes,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The value. `functions` stand for classes and functions by their full names, `persistent` gives outside values.

    They raise ValueError or TypeError for arguments that are invalid.
    """
    reader = _Reader(functions or {}, persistent)
    position = 0
    try:
        for opcode, argument, at in pickletools.genops(data):
            position = at or 0
            reader.apply(opcode.name, argument)
            if reader.values > VALUES_MAX:
                raise PickleRefused(position, f"more than {VALUES_MAX:,} values", is_too_large=True)
        return reader.result()
    except PickleRefused:
        raise
    except _Refused as error:
        raise PickleRefused(position, str(error)) from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # What genops raises, and a stack or memo that lacks what an operation needs.
        raise PickleRefused(position, f"the pickle is damaged ({type(error).__name__})") from None


class _Refused(Exception):
    """The operation makes something that is no plain value."""


class _Reader:
    """The stack and the memo of a pickle."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], persistent: Callable[[Any], Any] | None) -> None:
        self.values = 0
        self._functions = functions
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        """Where in the stack the marks are."""
        self._memo: dict[int, Any] = {}
        self._changes: dict[str, Callable[[], None]] = {
            "MARK": lambda: self._marks.append(len(self._stack)),
            "POP": self._pop,
            "POP_MARK": lambda: self._since_mark().clear(),
            "DUP": lambda: self._push(self._stack[-1]),
            "TUPLE": lambda: self._push(tuple(self._since_mark())),
            "LIST": lambda: self._push(self._since_mark()),
            "DICT": lambda: self._push(_dict_of(self._since_mark())),
            "APPEND": lambda: self._extend([self._stack.pop()]),
            "APPENDS": lambda: self._extend(self._since_mark()),
            "SETITEM": lambda: self._update([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda: self._update(self._since_mark()),
            "MEMOIZE": lambda: self._memo.update({len(self._memo): self._stack[-1]}),
            "STOP": lambda: None,
        }
        if functions:
            self._changes |= {
                "STACK_GLOBAL": lambda: self._name(f"{self._stack.pop(-2)}.{self._stack.pop()}"),
                "REDUCE": self._call,
                "NEWOBJ": self._call,
                "BUILD": self._set_state,
            }
        if persistent is not None:
            self._changes["BINPERSID"] = self._outside

    def apply(self, name: str, argument: Any) -> None:
        if name == "GLOBAL" and self._functions:
            self._name(argument.replace(" ", "."))
        elif name in _ARGUMENTS:
            self._push(argument)
        elif name in _CONSTANTS:
            self._push(_CONSTANTS[name])
        elif name in _EMPTY:
            self._push(_EMPTY[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self._push(self._memo[argument])
        elif name in _TUPLES:
            self._make_tuple(_TUPLES[name])
        elif name in self._changes:
            self._changes[name]()
        elif name not in _IGNORED:
            raise _Refused(f"the operation {name} is refused: only plain values are read")

    def result(self) -> Any:
        if len(self._stack) != 1 or self._marks:
            raise _Refused("the pickle is damaged: it has not one value")
        return self._stack[0]

    def _name(self, name: str) -> None:
        if name not in self._functions:
            raise _Refused(f"{name[:100]} is refused: no class or function of the pickle is used")
        self._push(Named(name, self._functions[name]))

    def _call(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, Named) or not isinstance(arguments, tuple):
            raise _Refused("the pickle is damaged: it calls something that is no function")
        try:
            self._push(function.call(*arguments))
        except (TypeError, ValueError) as error:
            raise _Refused(f"{function.name} has invalid arguments: {error!s:.100}") from None

    def _set_state(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):
            raise _Refused("the pickle is damaged: it sets the state of something that has none")

    def _outside(self) -> None:
        assert self._persistent is not None
        try:
            self._push(self._persistent(self._stack.pop()))
        except (TypeError, ValueError) as error:
            raise _Refused(f"a value outside of the pickle is invalid: {error!s:.100}") from None

    def _push(self, value: Any) -> None:
        self.values += 1
        self._stack.append(value)

    def _pop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _make_tuple(self, length: int) -> None:
        if len(self._stack) < length:
            raise _Refused("the pickle is damaged: a tuple lacks values")
        values = tuple(self._stack[-length:])
        del self._stack[-length:]
        self._push(values)

    def _since_mark(self) -> list[Any]:
        mark = self._marks.pop()
        values = self._stack[mark:]
        del self._stack[mark:]
        return values

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise _Refused("values are appended to something that is no list")
        target.extend(values)

    def _update(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise _Refused("items are set in something that is no dict")
        target.update(_dict_of(values))


def _dict_of(values: list[Any]) -> dict[Any, Any]:
    """A dict of keys and values in turns. A tuple is no key: the hash of a deeply nested one overflows the C stack."""
    if len(values) % 2:
        raise _Refused("a key has no value")
    for key in values[::2]:
        if not isinstance(key, str | int | float | bytes | Record | None):
            raise _Refused(f"a key is a {type(key).__name__}")
    return dict(zip(values[::2], values[1::2], strict=True))
