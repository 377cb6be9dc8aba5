"""Reads an MLflow registry from its server.

Invariants:
- Credentials come from the environment variables that MLflow's own client reads, and go to the named server only: a
  redirect is refused.
- Answers, pages and times are bounded. What is not the answer of an MLflow registry is a typed error.
"""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

import msgspec

from forged.errors import Unavailable
from forged.registry.mlflow import errors
from forged.registry.mlflow.conversion import DELETED_STAGE, FoundModel, FoundRegistry, FoundVersion
from forged.retry import RetryPolicy

ANSWER_BYTES_MAX = 64 << 20
OPERATION_TIMEOUT_S = 30.0
"""So long the server may send nothing."""
ANSWER_TIMEOUT_S = 120.0
MODELS_OF_A_PAGE = 100
VERSIONS_OF_A_PAGE = 200
PAGES_MAX = 100_000
RETRIES = RetryPolicy(attempts=4, delay_s=1.0, exponential=True)
API = "/api/2.0/mlflow/"
REFERENCES = ("models:/", "runs:/")
"""What a source begins with that does not say where the files are."""
ACCESS_DENIED = frozenset({401, 403})
TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
NOT_FOUND = 404

Answer = TypeVar("Answer")


class _Pair(msgspec.Struct):
    key: str
    value: str = ""


class _Alias(msgspec.Struct):
    alias: str
    version: str | int


class _Model(msgspec.Struct):
    name: str
    description: str | None = None
    tags: list[_Pair] = []
    aliases: list[_Alias] = []


class _ModelPage(msgspec.Struct):
    registered_models: list[_Model] = []
    next_page_token: str | None = None


class _Version(msgspec.Struct):
    name: str
    version: str | int
    creation_timestamp: int | str = 0
    current_stage: str | None = None
    status: str | None = None
    description: str | None = None
    source: str | None = None
    run_id: str | None = None
    user_id: str | None = None
    tags: list[_Pair] = []


class _VersionPage(msgspec.Struct):
    model_versions: list[_Version] = []
    next_page_token: str | None = None


class _Location(msgspec.Struct):
    artifact_uri: str = ""


class _Metric(msgspec.Struct):
    key: str
    value: float | str = 0.0


class _RunData(msgspec.Struct):
    metrics: list[_Metric] = []


class _RunBody(msgspec.Struct):
    data: _RunData = msgspec.field(default_factory=_RunData)


class _Run(msgspec.Struct):
    run: _RunBody


class _Failure(msgspec.Struct):
    error_code: str = ""
    message: str = ""


class _NotFound(Exception):
    """The server does not know what was asked for."""


class _NoRedirects(HTTPRedirectHandler):
    """Redirects carry the credentials on to servers that nobody has named."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        fp.close()
        raise errors.moved(req.full_url.partition("?")[0], newurl)


def read_server(
    url: str,
    environ: Mapping[str, str],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FoundRegistry:
    """All models, versions and metrics of their runs."""
    server = _Server(url, environ, clock, sleep)
    models = {model.name: model for model in server.models()}
    versions = list(server.versions())
    metrics = {run_id: server.metrics(run_id) for run_id in dict.fromkeys(one.run_id for one in versions if one.run_id)}
    return FoundRegistry(models, versions, metrics)


class _Server:
    """An MLflow server."""

    def __init__(
        self, url: str, environ: Mapping[str, str], clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._url = _checked_url(url)
        self._headers = {"Accept": "application/json", **_authorization(environ)}
        self._opener = build_opener(_NoRedirects, HTTPSHandler(context=_tls(environ)))
        self._clock = clock
        self._sleep = sleep

    def models(self) -> Iterator[FoundModel]:
        method = "registered-models/search"
        for page in self._pages(method, _ModelPage, MODELS_OF_A_PAGE):
            for model in page.registered_models:
                yield FoundModel(
                    model.name,
                    model.description or "",
                    _pairs(model.tags),
                    {one.alias: str(one.version) for one in model.aliases},
                )

    def versions(self) -> Iterator[FoundVersion]:
        for page in self._pages("model-versions/search", _VersionPage, VERSIONS_OF_A_PAGE):
            for one in page.model_versions:
                yield self._found(one)

    def _found(self, one: _Version) -> FoundVersion:
        source = one.source or ""
        is_reference = source.startswith(REFERENCES) and one.current_stage != DELETED_STAGE
        return FoundVersion(
            one.name,
            str(one.version),
            one.current_stage or "",
            one.status or "",
            self._milliseconds(one.creation_timestamp),
            one.description or "",
            source,
            self._location(one.name, str(one.version)) if is_reference else "",
            one.run_id or "",
            one.user_id or "",
            _pairs(one.tags),
        )

    def _milliseconds(self, stamp: int | str) -> int:
        """Some servers write numbers of 64 bits as texts."""
        text = str(stamp)
        if not (text.isascii() and text.isdigit() and len(text) <= 20):
            raise errors.answer_invalid(self._url, f"creation_timestamp must be milliseconds, got {text!r}")
        return int(text)

    def _location(self, name: str, version: str) -> str:
        try:
            return self._ask("model-versions/get-download-uri", _Location, name=name, version=version).artifact_uri
        except _NotFound:
            return ""

    def metrics(self, run_id: str) -> dict[str, float]:
        """The last value of each metric of a run; empty if the run is deleted."""
        try:
            run = self._ask("runs/get", _Run, run_id=run_id).run
        except _NotFound:
            return {}
        try:
            return {one.key: float(one.value) for one in run.data.metrics}
        except ValueError as error:
            raise errors.answer_invalid(self._url, f"a metric of run {run_id} is no number: {error}") from None

    def _pages(self, method: str, page_type: type[Any], entries: int) -> Iterator[Any]:
        token = ""
        seen: set[str] = set()
        while True:
            fields = {"max_results": str(entries)} | ({"page_token": token} if token else {})
            try:
                page = self._ask(method, page_type, **fields)
            except _NotFound:
                raise errors.answer_invalid(self._url, f"it has no {API}{method}") from None
            yield page
            token = page.next_page_token or ""
            if not token:
                return
            if token in seen or len(seen) == PAGES_MAX:
                raise errors.answer_invalid(self._url, "its pages have no end")
            seen.add(token)

    def _ask(self, method: str, answer_type: type[Answer], **fields: str) -> Answer:
        """Ask again after a failure: MLflow's server ends its workers when they are slow, and starts others."""
        for pause_s in RETRIES.delays(lambda: 0.0):
            try:
                return self._ask_once(method, answer_type, fields)
            except Unavailable:
                self._sleep(pause_s)
        return self._ask_once(method, answer_type, fields)

    def _ask_once(self, method: str, answer_type: type[Answer], fields: Mapping[str, str]) -> Answer:
        url = f"{self._url}{API}{method}"
        request = Request(f"{url}?{urlencode(fields)}", headers=self._headers)  # noqa: S310 - http or https, as checked
        deadline = self._clock() + ANSWER_TIMEOUT_S
        try:
            with self._opener.open(request, timeout=OPERATION_TIMEOUT_S) as response:
                body = self._body(url, response, deadline)
        except HTTPError as error:
            with error:
                raise self._refused(url, error, deadline) from None
        except URLError as error:
            raise _unreachable(url, error.reason) from error
        except (HTTPException, OSError) as error:
            raise _broken(url, error) from error
        try:
            return msgspec.json.decode(body, type=answer_type)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise errors.answer_invalid(url, str(error)) from None

    def _body(self, url: str, response: HTTPResponse | HTTPError, deadline: float) -> bytes:
        body = bytearray()
        while received := response.read1(64 << 10):
            body += received
            if len(body) > ANSWER_BYTES_MAX:
                raise errors.answer_invalid(url, f"it has more than {ANSWER_BYTES_MAX:,} bytes")
            if self._clock() > deadline:
                raise errors.unavailable(url, f"its answer takes longer than {ANSWER_TIMEOUT_S:g} s")
        if getattr(response, "length", None):
            raise errors.answer_invalid(url, f"it ends after {len(body):,} bytes, before its end")
        return bytes(body)

    def _refused(self, url: str, error: HTTPError, deadline: float) -> Exception:
        if error.code in ACCESS_DENIED:
            return errors.access_denied(url, error.code)
        try:
            failure = msgspec.json.decode(self._body(url, error, deadline), type=_Failure)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, HTTPException, OSError):
            failure = _Failure()
        if error.code == NOT_FOUND:
            return _NotFound()
        text = f"status {error.code} {failure.error_code} {failure.message}".strip()
        return errors.unavailable(url, text) if error.code in TEMPORARY else errors.answer_invalid(url, text)


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or not url.isprintable() or " " in url:
        raise errors.source_invalid(url, "is no URL of a server")
    if parts.username is not None or parts.password is not None:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        raise errors.source_invalid(
            shown, "must not contain a user or password: MLFLOW_TRACKING_USERNAME and _PASSWORD"
        )
    if parts.query or parts.fragment:
        raise errors.source_invalid(url, "must end before `?` and `#`")
    return url.rstrip("/")


def _authorization(environ: Mapping[str, str]) -> dict[str, str]:
    token, user = environ.get("MLFLOW_TRACKING_TOKEN", ""), environ.get("MLFLOW_TRACKING_USERNAME", "")
    if not (token.isascii() and token.isprintable()):
        raise errors.setting_invalid("MLFLOW_TRACKING_TOKEN", "must have printable ASCII characters only")
    if user:
        pair = f"{user}:{environ.get('MLFLOW_TRACKING_PASSWORD', '')}".encode()
        return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
    return {"Authorization": f"Bearer {token}"} if token else {}


def _tls(environ: Mapping[str, str]) -> ssl.SSLContext:
    """Verifies the server against the system's authorities, or the one that the environment names."""
    authority = environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or None
    own = environ.get("MLFLOW_TRACKING_CLIENT_CERT_PATH")
    try:
        context = ssl.create_default_context(cafile=authority)
    except (OSError, ValueError) as error:
        raise errors.setting_invalid("MLFLOW_TRACKING_SERVER_CERT_PATH", f"names no certificate: {error}") from error
    if own:
        try:
            context.load_cert_chain(own)
        except (OSError, ValueError) as error:
            raise errors.setting_invalid(
                "MLFLOW_TRACKING_CLIENT_CERT_PATH", f"names no certificate: {error}"
            ) from error
    return context


def _pairs(pairs: list[_Pair]) -> dict[str, str]:
    return {one.key: one.value for one in pairs}


def _unreachable(url: str, reason: object) -> Exception:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return errors.certificate_refused(url, reason.verify_message)
    return errors.unavailable(url, str(reason))


def _broken(url: str, error: Exception) -> Exception:
    if isinstance(error, HTTPException) and not isinstance(error, OSError):
        return errors.answer_invalid(url, f"{type(error).__name__}: {error}")
    return errors.unavailable(url, str(error) or type(error).__name__)
