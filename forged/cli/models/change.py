"""`forgectl models promote`, `transition`, `rollback`, `tag`, `alias`, `policy` and `rm`: what changes a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from shlex import quote
from typing import Any

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.forgectl.values import settings, texts_by_key
from forged.cli.models import names, words
from forged.cli.models.names import SERVING
from forged.cli.models.words import ARROW, PATH
from forged.cli.process import EXIT_OK
from forged.errors import ConfigError, RequestRefused
from forged.plain_client.connection import PlainConnection

CANARY_ACTIONS = ("off", "advise", "act")
LIMITS = frozenset({"max_latency_p99_ms", "min_accuracy"})
"""The keys of a policy that may have no value."""
NUMBERS = frozenset({"evidence_max_age_s", "rollback_threshold"})
DEFAULT = ""
"""The value that restores the default of a key."""


# States.


def promote(options: Options) -> int:
    """Give a version the next state, or the one of `--to`; the daemon refuses if its state has changed meanwhile."""
    with DaemonConnection(options) as daemon:
        before = answers.map_in(names.view(daemon, names.with_ref(options.model)), "metadata")
        to = options.to or _next(before)
        after = _transition(daemon, before, to, options)
    answer(options, after, lambda: _show_transition(before, after))
    return EXIT_OK


def transition(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        before = answers.map_in(names.view(daemon, names.with_ref(options.model)), "metadata")
        after = _transition(daemon, before, options.state, options)
    answer(options, after, lambda: _show_transition(before, after))
    return EXIT_OK


def _next(metadata: Row) -> str:
    state = f"{metadata.get('state')}"
    place = PATH.index(state) + 1 if state in PATH else len(PATH)
    if place < len(PATH):
        return PATH[place]
    raise RequestRefused(
        "model_transition_refused",
        f"{words.name_of(metadata)} is {state}; no promotion leads on from there",
        f"`forgectl models show {words.typed(metadata)}` tells what it may become",
    )


def _transition(daemon: PlainConnection, before: Row, to: str, options: Options) -> Row:
    after: Row = words.as_text(
        answers.one(
            daemon,
            "TransitionModel",
            model_id=before.get("model_id"),
            version=names.version(f"{before.get('version')}"),
            to=to,
            reason=options.reason or "",
            expected=before.get("state"),
            waiver=options.waive or "",
        )
    )
    return after


def _show_transition(before: Row, after: Row) -> None:
    typed, was, now = words.typed(after), before.get("state"), after.get("state")
    hint = {
        "validating": f"record its evidence with `forgectl models validate {typed}`, then promote it",
        "staging": f"`forgectl models promote {typed}` makes it a canary" if was == "validating" else "",
        "canary": f"`forgectl models canary {typed}` reports what it shows in service",
        "production": "it serves now",
        "deprecated": f"`forgectl models transition {typed} archived` ends its life",
        "archived": f"`forgectl models rm {typed}` deletes it from the registry",
    }.get(f"{now}", "")
    tables.print_wrapped(f"{words.name_of(after)}: {was} {ARROW} {now}{f'; {hint}' if hint else ''}")


def roll_back(options: Options) -> int:
    found = names.named(options.model)
    with DaemonConnection(options) as daemon:
        version = names.exact(daemon, found) if found.ref else None
        reply = words.as_text(
            answers.one(
                daemon,
                "RollBackModel",
                model_id=found.model,
                version=version,
                to=None if options.to is None else names.version(options.to),
                reason=options.reason or "",
            )
        )
    answer(options, reply, lambda: _show_rollback(found.model, reply))
    return EXIT_OK


def _show_rollback(model: str, reply: Row) -> None:
    version, to = (tables.field("", reply.get(key)) for key in ("version", "to"))
    serves = f"{model}@{to} serves" if reply.get("to") else "it is in staging again"
    print(f"took {model}@{version} out of service; {serves}")


# Labels.


def tag(options: Options) -> int:
    found, tags = names.with_ref(options.model), texts_by_key(options.tags, "is not a tag", "use KEY=VALUE")
    if not tags and not options.remove:
        raise ConfigError("usage_wrong", "no tag is given", "give KEY=VALUE, or --remove KEY")
    with DaemonConnection(options) as daemon:
        version = names.exact(daemon, found)
        after = words.as_text(
            answers.one(
                daemon, "TagModel", model_id=found.model, version=version, set=tags, remove=list(options.remove)
            )
        )
    shown = words.tags(after.get("tags")) if after.get("tags") else "no tags"
    answer(options, after, lambda: print(f"{words.name_of(after)}: {shown}"))
    return EXIT_OK


def alias(options: Options) -> int:
    if options.remove:
        model, version = names.alone(options.model), None
        with DaemonConnection(options) as daemon:
            _move_alias(daemon, model, version, options)
        answer(options, {}, lambda: print(f"removed the alias {options.alias} of {model}"))
        return EXIT_OK
    found = names.with_ref(options.model)
    with DaemonConnection(options) as daemon:
        version = names.exact(daemon, found)
        _move_alias(daemon, found.model, version, options)
    name = f"{found.model}@{'.'.join(map(str, version))}"
    answer(options, {}, lambda: print(f"{found.model}@{options.alias} is {name} now"))
    return EXIT_OK


def _move_alias(daemon: PlainConnection, model: str, version: list[int] | None, options: Options) -> None:
    if options.alias == SERVING:
        raise RequestRefused(
            "model_alias_reserved",
            f"the alias {SERVING} moves by promotion and rollback only",
            f"use `forgectl models promote {quote(model)}@VERSION` or `forgectl models rollback {quote(model)}`",
        )
    reason = options.reason or ""
    answers.one(daemon, "MoveAlias", model_id=model, alias=options.alias, version=version, reason=reason)


# Policy.


def policy(options: Options) -> int:
    """Show the policy of a model, or change keys of it."""
    model, wanted = names.alone(options.model), settings(options.settings)
    with DaemonConnection(options) as daemon:
        shown = answers.map_in(names.view(daemon, names.named(model)), "policy")
        if wanted:
            shown = answers.one(
                daemon,
                "SetModelPolicy",
                model_id=model,
                policy=_merged(shown, wanted),
                reason=options.reason or "",
            )
    answer(options, shown, lambda: _show_policy(shown))
    return EXIT_OK


def _merged(present: Row, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The present policy with the wanted changes; `KEY=` restores the default."""
    unknown = wanted.keys() - present.keys()
    if unknown:
        raise ConfigError("setting_invalid", f"a policy has no {_listed(unknown)}", f"the keys are {_listed(present)}")
    for key, value in wanted.items():
        form = "" if value == DEFAULT else _form_lacked(key, value)
        if form:
            raise ConfigError(
                "setting_invalid",
                f"{key} must be {form}, got {value!r}",
                f"correct {key}; `{key}=` restores the default",
            )
    return {key: value for key, value in {**present, **wanted}.items() if key not in wanted or value != DEFAULT}


def _form_lacked(key: str, value: Any) -> str:
    """The form that a value of a policy should have and has not; empty if it has."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "canary":
        return "" if value in CANARY_ACTIONS else f"one of {', '.join(CANARY_ACTIONS)}"
    if key == "requires_validation":
        return "" if isinstance(value, bool) else "true or false"
    if key in LIMITS:
        return "" if is_number or value is None else "a number or none"
    return "" if is_number or key not in NUMBERS else "a number"


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys))


def _show_policy(shown: Row) -> None:
    tables.pairs(shown)
    tables.print_wrapped(words.policy(shown))


# Deletion.


def remove(options: Options) -> int:
    found = names.with_ref(options.model)
    with DaemonConnection(options) as daemon:
        version = names.exact(daemon, found)
        daemon.request("DeleteModel", model_id=found.model, version=version, reason=options.reason or "")
    name = f"{found.model}@{'.'.join(map(str, version))}"
    answer(options, {}, lambda: print(f"deleted {name} from the registry; its files stay, and so does its history"))
    return EXIT_OK
