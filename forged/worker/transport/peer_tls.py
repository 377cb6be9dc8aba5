"""TLS between the workers of a job.

Law: both ends show a certificate, and both have to be signed by the one authority that the job's workers trust; there
is no way back to plain connections. A worker's certificate names the host at which the others reach it. The files are
read when the worker connects: one that is renewed counts from the next start on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from forged.errors import ConfigError, Problem
from forged.net.transport.sockets import SystemNetwork
from forged.net.transport.tls import CLIENT_SETTINGS, client_context, server_context


@dataclass(frozen=True, slots=True)
class PeerTls:
    """The files with which a worker proves itself to the others: those with which it may prove itself to the daemon."""

    authority: str | Path
    certificate: str | Path
    key: str | Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """What `$FORGED_CA`, `$FORGED_CERTIFICATE` and `$FORGED_KEY` name."""
        missing = [name for name in CLIENT_SETTINGS if not environment.get(name)]
        if missing:
            raise ConfigError(
                "peer_tls_incomplete",
                "TLS between workers needs an authority, a certificate and its key",
                "set the variables named here",
                [Problem(name, None, "the path of a file in PEM") for name in missing],
            )
        return cls(*(environment[name] for name in CLIENT_SETTINGS))

    def network(self) -> SystemNetwork:
        """The machine's network, for both ends of such connections."""
        # First the client's: its complaints name the files as they are named here.
        client = client_context(self.authority, self.certificate, self.key)
        return SystemNetwork(tls_client=client, tls_server=server_context(self.certificate, self.key, self.authority))
