"""Contexts for TLS, and what its failures mean in words.

Law: a context is whole or not made. Every file it needs is read here, and every one that is missing or wrong is named
together with its setting; nothing is asked at a terminal, and nothing below TLS 1.2 is spoken. A listener whose files
are renewed shows the old ones until the new ones are whole.
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
    "CERTIFICATE_REQUIRED": "it wants a client certificate and got none",
    "CERTIFICATE_EXPIRED": "it holds our certificate to be expired",
    "CERTIFICATE_UNKNOWN": "it does not accept our certificate",
    "BAD_CERTIFICATE": "it does not accept our certificate",
    "HANDSHAKE_FAILURE": "it does not accept our certificate, or wants one",
    "HTTP_REQUEST": "it speaks HTTP, not TLS",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no client certificate",
    "PROTOCOL_VERSION": "it speaks no TLS version that we accept",
    "UNKNOWN_CA": "it does not trust the authority that signed our certificate",
    "UNSUPPORTED_PROTOCOL": "it speaks no TLS version that we accept",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
}
"""OpenSSL's reasons, without the prefixes that tell which version reported them, in words."""

TLS_FAILED = "tls_failed"
"""The code of the error for a peer with which TLS did not come about."""

ALERT_PREFIXES = ("TLSV13_ALERT_", "TLSV1_ALERT_", "SSLV3_ALERT_", "TLSV1_", "SSLV3_")


class Settings(NamedTuple):
    """What the files are called where operators name them."""

    authority: str
    certificate: str
    key: str


DAEMON_SETTINGS = Settings("tls_client_ca", "tls_certificate", "tls_key")
CLIENT_SETTINGS = Settings("FORGED_CA", "FORGED_CERTIFICATE", "FORGED_KEY")
"""Variables of the environment, in the order of `client_context`."""


class _TellingContext(ssl.SSLContext):
    """A server's context that can be renewed, and whose connections let a client know why its handshake failed.

    asyncio closes a failed handshake without sending the alert that OpenSSL has written (gh-98078), and the client
    would see a broken network where a certificate is missing. So while there is an alert to send, the failure is
    reported as "more input wanted", at which asyncio sends what there is. The failure is raised when more comes, and
    until then the handshake's time limit runs on.

    A context that holds a certificate never lets go of it: one with another kind of key would be loaded beside it, and
    the client's preference would decide which is shown. So each handshake is handed over to the latest successor.
    """

    successor: ssl.SSLContext | None = None
    """What was made of the files when they were last renewed."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(made, _TellingObject)
        made.outgoing = outgoing
        return made


def _hand_over(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
    """Called by OpenSSL in each handshake, before a certificate is chosen."""
    assert isinstance(context, _TellingContext)
    if context.successor is not None:
        connection.context = context.successor


class _TellingObject(ssl.SSLObject):
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
    """What a listener shows; with `client_ca`, only clients whose certificate that authority signed get in."""
    context = _TellingContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _TellingObject
    context.sni_callback = _hand_over
    # A session that is taken up again is not verified again, and would outlive the authority that let it in. Only with
    # TLS 1.2, which has to be asked for, OpenSSL remembers sessions of which Python cannot make it let go.
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
    """Let a listener show what the files hold now, to those who connect from now on.

    The files are those of its `server_context`, or others in their place. Where they do not fit, nothing changes.
    """
    assert isinstance(context, _TellingContext), "only what a listener shows is renewed"
    assert (client_ca is None) == (context.verify_mode == ssl.CERT_NONE), "whether clients are asked is for good"
    context.successor = server_context(certificate, key, client_ca)


def client_context(
    ca: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    *,
    minimum: Version = "1.3",
) -> ssl.SSLContext:
    """What a client trusts (`ca`, or else the system's authorities) and the certificate that it shows, if any."""
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
    """The error for a peer with which TLS did not come about, or broke, at `where`."""
    return PeerError(TLS_FAILED, f"TLS with {where} failed: {_reason(error)}", "see the certificates on both sides")


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
            f"TLS {minimum!r} cannot be the minimum",
            "use 1.3, or 1.2 for old peers",
            [Problem("minimum", minimum, '"1.2" or "1.3"')],
        )
    return VERSIONS[minimum]


def _refuse(problems: Iterable[Problem]) -> None:
    if found := tuple(problems):
        raise ConfigError("tls_files", "the TLS files cannot be used", "mend the settings named here", found)


def _identity_problems(
    context: ssl.SSLContext, certificate: str | Path, key: str | Path, settings: Settings
) -> list[Problem]:
    """Load our certificate and key. Each file is read by itself first: OpenSSL does not say which one it disliked."""
    problems = [
        *_file_problems(certificate, settings.certificate, "CERTIFICATE"),
        *_file_problems(key, settings.key, "PRIVATE KEY"),
    ]
    if problems:
        return problems
    try:
        # Without a password argument OpenSSL would ask for the passphrase at the terminal, and a daemon would hang.
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
