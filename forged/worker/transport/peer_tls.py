"""TLS between the workers of a job.

Invariants:
- Both ends present a certificate that the job's authority has signed; there is no fallback to plain connections.
- A worker's certificate names the host at which its peers reach it.
- The files are read when the worker connects, so a renewed file takes effect at the next session.
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
    """A worker's TLS files for its peers, the same as for the daemon."""

    authority: str | Path
    certificate: str | Path
    key: str | Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """The files that `$FORGED_CA`, `$FORGED_CERTIFICATE` and `$FORGED_KEY` name."""
        missing = [name for name in CLIENT_SETTINGS if not environment.get(name)]
        if missing:
            raise ConfigError(
                "peer_tls_incomplete",
                "TLS between workers needs an authority, a certificate and its key",
                "set the variables named here",
                [Problem(name, None, "the path of a PEM file") for name in missing],
            )
        return cls(*(environment[name] for name in CLIENT_SETTINGS))

    def network(self) -> SystemNetwork:
        """The host's network with these files, for dialling and for listening."""
        # The client's first: its errors name the files as they are named here.
        client = client_context(self.authority, self.certificate, self.key)
        return SystemNetwork(tls_client=client, tls_server=server_context(self.certificate, self.key, self.authority))
