"""`forgectl tokens`: the tokens that a daemon accepts."""

from __future__ import annotations

import os

from forged.cli.forgectl import answers, tables
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options, Parser, positional, verb, verbs_of
from forged.cli.forgectl.values import lifetime
from forged.cli.process import EXIT_OK

COLUMNS = ("token_id", "name", "role", "jobs", "created_at", "expires_at", "revoked_at")


def fill(tokens: Parser) -> None:
    """Add the verbs."""
    verbs = verbs_of(tokens, _list)
    verb(verbs, "ls", _list, "list tokens without their text", aliases=["list"])
    create = verb(verbs, "create", _create, "create a token and print its text, which is shown only once")
    positional(create, "name", "NAME")
    create.add_argument("--role", required=True, choices=("viewer", "worker", "operator"))
    create.add_argument("--job", action="append", metavar="JOB", help="only for this job; repeatable")
    create.add_argument("--ttl", type=lifetime, metavar="S", help="seconds until it expires")
    positional(verb(verbs, "revoke", _revoke, "revoke a token"), "token_id", "TOKEN")


def _create(options: Options) -> int:
    from forged.auth.tokens import SECRET_BYTES_MIN, encode_token

    secret = os.urandom(SECRET_BYTES_MIN)
    fields = {"name": options.name, "role": options.role, "secret": secret, "jobs": options.job, "ttl_s": options.ttl}
    with DaemonConnection(options) as daemon:
        token = answers.one(daemon, "CreateToken", **fields) | {"token": encode_token(secret)[1]}
        answer(options, token, lambda: print(token["token"]))
    return EXIT_OK


def _list(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        tokens = answers.pages(daemon, "ListTokens", field="tokens", key="token_id")
        tokens.sort(key=lambda token: token.get("created_at") or 0.0)
        answer(options, {"tokens": tokens}, lambda: tables.table(tokens, COLUMNS, "no tokens"))
    return EXIT_OK


def _revoke(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        token = answers.one(daemon, "RevokeToken", token_id=options.token_id)
        answer(options, token, lambda: print(f"revoked {options.token_id} ({tables.field('', token.get('name'))})"))
    return EXIT_OK
