"""What a plugin may put on record.

Law: a plugin says only facts of its own types, so that nobody has to wonder who said that a worker failed; and only
such as can be stored and read again, because a decision that cannot be stored has everybody's state read anew, and one
that cannot be read keeps the daemon from starting. It writes nothing into the store but facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from forged.errors import RequestRefused, describe
from forged.kernel.messages import Decision, Fact

FACTS_MAX = 64
"""Facts that become true together."""
FACT_BYTES_MAX = 64 << 10
REPLY_BYTES_MAX = 512 << 10
DEPTH_MAX = 200
"""Levels of nesting. How many an interpreter can decode differs by version, and another one may read the journal."""
DAEMON = "forged"


def check_decision(decision: Decision[Any], *, own: bool) -> None:
    """Raise `RequestRefused` for a decision that is not a plugin's to take, or cannot be stored."""
    check_facts(decision.facts, own=own)
    check_place(decision.job, decision.generation)
    if decision.writes:
        reason = f"it writes {', '.join(map(repr, decision.writes))}"
        raise RequestRefused("writes_foreign", reason, "keep what the plugin has to keep in context.directory()")
    size = len(_encoded(decision.reply, "the reply", "reply_unfit"))
    if size > REPLY_BYTES_MAX:
        raise RequestRefused("reply_too_large", f"the reply has {size} bytes", f"say it in {REPLY_BYTES_MAX}")


def check_place(job: object, generation: object = 0) -> None:
    """Raise `RequestRefused` unless a fact in this job and generation can be read again."""
    if not isinstance(job, str):
        raise RequestRefused("fact_unfit", f"its job is {job!r}", "name a job, or none by an empty text")
    _encoded(job, "its job", "fact_unfit")
    if type(generation) is not int or generation < 0:
        raise RequestRefused("fact_unfit", f"{generation!r} is no generation", "give a whole number from 0 on")


def check_facts(facts: Sequence[Fact], *, own: bool) -> None:
    """Raise `RequestRefused` for facts that a plugin must not say, or not so many at once."""
    if len(facts) > FACTS_MAX:
        raise RequestRefused("facts_too_many", f"{len(facts)} facts at once", f"say at most {FACTS_MAX} at once")
    for fact in facts:
        _check(fact, own=own)


def _check(fact: Fact, *, own: bool) -> None:
    name = type(fact).__name__
    if not isinstance(fact, Fact):
        raise RequestRefused("fact_strange", f"{name} is no class of facts", "derive it from Fact")
    if own and type(fact).__module__.partition(".")[0] == DAEMON:
        raise RequestRefused("fact_foreign", f"{name} is the daemon's to say", "define a class of facts in the plugin")
    encoded = _encoded(fact, name, "fact_unfit")
    if len(encoded) > FACT_BYTES_MAX:
        reason = f"{name} has {len(encoded)} bytes"
        raise RequestRefused("fact_too_large", reason, f"say it in {FACT_BYTES_MAX}")
    try:
        msgspec.msgpack.decode(encoded, type=type(fact))
    except Exception as error:
        reason = f"{name} cannot be read again: {describe(error)}"
        raise RequestRefused("fact_unfit", reason, "give its fields values of their types") from error


def _encoded(value: Any, name: str, code: str) -> bytes:
    try:
        encoded = msgspec.msgpack.encode(value)
        too_deep = _is_too_deep(msgspec.msgpack.decode(encoded))
    except Exception as error:
        reason = f"{name} cannot be stored: {describe(error)}"
        raise RequestRefused(code, reason, "use plain values") from error
    if too_deep:
        raise RequestRefused(code, f"{name} is nested more than {DEPTH_MAX} levels deep", "use plain values")
    return encoded


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        if not containers:
            return False
        level = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    return True
