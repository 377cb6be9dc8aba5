"""Checks the facts and decisions of plugins.

Invariants:
- A plugin publishes facts of its own types only, so that the daemon's facts always come from the daemon.
- A fact is accepted only if it can be stored and decoded: a decision that cannot be stored makes all services reload
  their state, and a fact that cannot be decoded prevents the next start.
- A plugin's decision writes nothing else to the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from forged.errors import RequestRefused, describe
from forged.kernel.messages import Decision, Fact

FACTS_MAX = 64
"""Facts in one decision."""
FACT_BYTES_MAX = 64 << 10
REPLY_BYTES_MAX = 512 << 10
DEPTH_MAX = 200
"""Levels of nesting. How many an interpreter can decode differs by version, and another one may read the journal."""
DAEMON = "forged"


def check_decision(decision: Decision[Any], *, own: bool) -> None:
    """Raise `RequestRefused` for a decision that a plugin may not take, or that cannot be stored."""
    check_facts(decision.facts, own=own)
    check_job_and_generation(decision.job, decision.generation)
    if decision.writes:
        reason = f"the decision writes {', '.join(map(repr, decision.writes))}"
        raise RequestRefused("writes_foreign", reason, "store the plugin's data in context.directory()")
    size = len(_encoded(decision.reply, "the reply", "reply_unfit"))
    if size > REPLY_BYTES_MAX:
        raise RequestRefused(
            "reply_too_large", f"the reply has {size} bytes", f"reply with at most {REPLY_BYTES_MAX} bytes"
        )


def check_job_and_generation(job: object, generation: object = 0) -> None:
    """Raise `RequestRefused` unless a fact of this job and generation can be stored and decoded."""
    if not isinstance(job, str):
        raise RequestRefused(
            "fact_unfit", f"job must be text, got {job!r}", "name a job, or pass an empty text for none"
        )
    _encoded(job, "its job", "fact_unfit")
    if type(generation) is not int or generation < 0:
        raise RequestRefused("fact_unfit", f"generation must be an integer >= 0, got {generation!r}")


def check_facts(facts: Sequence[Fact], *, own: bool) -> None:
    """Raise `RequestRefused` for facts that a plugin may not publish, or for too many."""
    if len(facts) > FACTS_MAX:
        raise RequestRefused("facts_too_many", f"{len(facts)} facts at once", f"publish at most {FACTS_MAX} at once")
    for fact in facts:
        _check(fact, own=own)


def _check(fact: Fact, *, own: bool) -> None:
    name = type(fact).__name__
    if not isinstance(fact, Fact):
        raise RequestRefused("fact_type_invalid", f"{name} is not a Fact", "derive the class from Fact")
    if own and type(fact).__module__.partition(".")[0] == DAEMON:
        raise RequestRefused("fact_foreign", f"{name} is a fact of the daemon", "define the fact class in the plugin")
    encoded = _encoded(fact, name, "fact_unfit")
    if len(encoded) > FACT_BYTES_MAX:
        reason = f"{name} has {len(encoded)} bytes"
        raise RequestRefused("fact_too_large", reason, f"publish at most {FACT_BYTES_MAX} bytes")
    try:
        msgspec.msgpack.decode(encoded, type=type(fact))
    except Exception as error:
        reason = f"{name} cannot be decoded: {describe(error)}"
        raise RequestRefused("fact_unfit", reason, "give the fields values of their types") from error


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
