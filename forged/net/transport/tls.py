"""TLS contexts, their renewal, and readable TLS errors.

Invariants:
- A context is complete or an error: every missing or invalid file is reported with its setting. No passphrase is asked
  for at a terminal. TLS versions below 1.2 are refused.
- A renewed listener uses the old files until the new ones are valid.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from forged.errors import ConfigError, PeerError, Problem

Version = Literal["1.2", "1.3"]
VERSIONS: dict[Version, ssl.TLSVersion] = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}

REASONS = {
    "CERTIFICATE_REQUIRED": "it requires a client certificate",
    "CERTIFICATE_EXPIRED": "it reports that our certificate has expired",
    "CERTIFICATE_UNKNOWN": "it does not accept our certificate",
    "BAD_CERTIFICATE": "it does not accept our certificate",
    "HANDSHAKE_FAILURE": "it does not accept our certificate, or requires one",
    "HTTP_REQUEST": "it speaks HTTP, not TLS",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it sent no client certificate",
    "PROTOCOL_VERSION": "it supports no TLS version that we accept",
    "UNKNOWN_CA": "it does not trust the authority that signed our certificate",
    "UNSUPPORTED_PROTOCOL": "it supports no TLS version that we accept",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
}
"""Messages for OpenSSL's reasons, without the version prefixes."""

TLS_FAILED = "tls_failed"
"""The error code of a failed TLS handshake."""

ALERT_PREFIXES = ("TLSV13_ALERT_", "TLSV1_ALERT_", "SSLV3_ALERT_", "TLSV1_", "SSLV3_")


class TlsSettingNames(NamedTuple):
    """The settings that name the TLS files."""

    authority: str
    certificate: str
    key: str


DAEMON_SETTINGS = TlsSettingNames("tls_client_ca", "tls_certificate", "tls_key")
CLIENT_SETTINGS = TlsSettingNames("FORGED_CA", "FORGED_CERTIFICATE", "FORGED_KEY")
"""Environment variables, in the order of `client_context`."""


class _AlertingContext(ssl.SSLContext):
    """A server context that can be renewed and that sends the TLS alert of a failed handshake.

    asyncio closes a failed handshake without sending the alert that OpenSSL has written (gh-98078), so a client without
    a certificate would see a network error. While an alert is unsent, the failure is therefore reported as "want read",
    upon which asyncio sends it. The failure is raised at the next call or ends with the handshake timeout.

    A context keeps every certificate that was loaded: a new one with another key type would be loaded beside it. So a
    renewal makes a new context, and each handshake switches to the latest one.
    """

    successor: ssl.SSLContext | None = None
    """The context of the last renewal."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(made, _AlertingObject)
        made.outgoing = outgoing
        return made


def _use_successor(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
    """The SNI callback: OpenSSL calls it in each handshake before it selects the certificate."""
    assert isinstance(context, _AlertingContext)
    if context.successor is not None:
        connection.context = context.successor


class _AlertingObject(ssl.SSLObject):
    outgoing: ssl.MemoryBIO
    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self._failure = error
            if self.outgoing.pending:
                raise ssl.SSLWantReadError from error
            raise


def server_context(
    certificate: str | Path,
    key: str | Path,
    client_ca: str | Path | None = None,
    *,
    minimum: Version = "1.3",
) -> ssl.SSLContext:
    """A server's context; with `client_ca`, clients need a certificate that is signed by this authority."""
    context = _AlertingContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _AlertingObject
    context.sni_callback = _use_successor
    # A resumed session is not verified again and would outlive a removed authority. With TLS 1.2, which must be
    # enabled explicitly, OpenSSL still caches sessions; Python cannot disable that.
    context.num_tickets = 0
    context.minimum_version = _version(minimum)
    problems = _identity_problems(context, certificate, key, DAEMON_SETTINGS)
    if client_ca is not None:
        problems += _authority_problems(context, client_ca, DAEMON_SETTINGS.authority)
        context.verify_mode = ssl.CERT_REQUIRED
    _refuse(problems)
    return context


def renew(
    context: ssl.SSLContext, certificate: str | Path, key: str | Path, client_ca: str | Path | None = None
) -> None:
    """Use the current content of the files for new connections of a listener; on `ConfigError` nothing changes."""
    assert isinstance(context, _AlertingContext), "only server contexts are renewed"
    assert (client_ca is None) == (context.verify_mode == ssl.CERT_NONE), "client verification cannot be switched"
    context.successor = server_context(certificate, key, client_ca)


def client_context(
    ca: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    *,
    minimum: Version = "1.3",
) -> ssl.SSLContext:
    """A client's context: the trusted authority (`ca`, default: the system's) and an optional client certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = _version(minimum)
    problems = []
    if ca is None:
        context.load_default_certs()
    else:
        problems += _authority_problems(context, ca, CLIENT_SETTINGS.authority)
    if certificate is not None and key is not None:
        problems += _identity_problems(context, certificate, key, CLIENT_SETTINGS)
    elif certificate is not None or key is not None:
        missing = CLIENT_SETTINGS.key if key is None else CLIENT_SETTINGS.certificate
        problems.append(Problem(missing, None, "set, because certificate and key belong together"))
    _refuse(problems)
    return context


def refusal(where: object, error: ssl.SSLError) -> PeerError:
    """The `PeerError` for a TLS failure with the peer at `where`."""
    return PeerError(TLS_FAILED, f"TLS with {where} failed: {_reason(error)}", "check the certificates on both sides")


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    reason = error.reason or "the connection ended"
    for prefix in ALERT_PREFIXES:
        reason = reason.removeprefix(prefix)
    return REASONS.get(reason, reason.lower().replace("_", " "))


def _version(minimum: Version) -> ssl.TLSVersion:
    if minimum not in VERSIONS:
        raise ConfigError(
            "tls_version_invalid",
            f"the minimum TLS version must be 1.2 or 1.3, got {minimum!r}",
            "use 1.3, or 1.2 for old peers",
            [Problem("minimum", minimum, '"1.2" or "1.3"')],
        )
    return VERSIONS[minimum]


def _refuse(problems: Iterable[Problem]) -> None:
    if found := tuple(problems):
        raise ConfigError("tls_files", "the TLS files cannot be used", "fix these settings", found)


def _identity_problems(
    context: ssl.SSLContext, certificate: str | Path, key: str | Path, settings: TlsSettingNames
) -> list[Problem]:
    """Load certificate and key. Each file is checked first, because OpenSSL does not report which one is invalid."""
    problems = [
        *_file_problems(certificate, settings.certificate, "CERTIFICATE"),
        *_file_problems(key, settings.key, "PRIVATE KEY"),
    ]
    if problems:
        return problems
    try:
        # Without a password OpenSSL would ask for the passphrase at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return [Problem(settings.key, str(key), f"the key of the certificate {certificate}")]
        return [
            Problem(settings.certificate, str(certificate), "a certificate chain in PEM"),
            Problem(settings.key, str(key), "its private key in PEM, without a passphrase"),
        ]
    return []


def _authority_problems(context: ssl.SSLContext, path: str | Path, setting: str) -> list[Problem]:
    if problems := _file_problems(path, setting, "CERTIFICATE"):
        return problems
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        return [Problem(setting, str(path), "a file with the authority's certificates in PEM")]
    return []


def _file_problems(path: str | Path, setting: str, label: str) -> list[Problem]:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        return [Problem(setting, str(path), text=f"cannot read {setting} {str(path)!r}: {error.strerror}")]
    if f"{label}-----".encode() not in text:
        return [Problem(setting, str(path), f"a file with a {label.lower()} in PEM")]
    return []
