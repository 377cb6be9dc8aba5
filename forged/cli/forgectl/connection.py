"""The connection of `forgectl` to its daemon.

The address comes from the options, else from the environment, else it is the default socket of this user.
"""

from __future__ import annotations

import os

from forged.cli.forgectl.parser import TIMEOUT_S, Options
from forged.plain_client.connection import PlainConnection

PROGRAM = "forgectl"


class DaemonConnection:
    """A connection to the daemon that the options name."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __enter__(self) -> PlainConnection:
        options = self._options
        token = os.environ.get("FORGED_TOKEN") if options.token is None else options.token
        self._daemon = PlainConnection(_endpoint(options), token or None, options.timeout or TIMEOUT_S)
        return self._daemon

    def __exit__(self, *error: object) -> None:
        self._daemon.close()


def _endpoint(options: Options) -> str:
    if options.endpoint:
        return str(options.endpoint)
    if options.socket:
        return f"unix://{options.socket}"
    from forged.paths import client_endpoints

    return client_endpoints(os.environ, os.getuid())[0]
