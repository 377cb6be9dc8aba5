"""Asks before something is deleted."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from forged.cli.forgectl.parser import Options
from forged.cli.process import remark
from forged.errors import ConfigError


def is_confirmed(options: Options, asked: Sequence[str]) -> bool:
    """Ask for confirmation of these deletions, unless `--yes` was given."""
    if options.yes or not asked:
        return True
    if options.json or not (sys.stdin and sys.stdin.isatty()):
        raise ConfigError(
            "consent_missing", f"this would delete {'; '.join(asked)}", "add --yes to delete without confirmation"
        )
    remark("\n".join(["this deletes", *(f"  {words}" for words in asked)]))
    print("continue? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}
