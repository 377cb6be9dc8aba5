"""Translates errors of object stores.

Invariants:
- A message contains the status, the code and one sentence of the server's answer, never the whole answer, which may
  show how a request was signed.
- No answer, a late answer, and answers with status 5xx, 408, 425 or 429 are retryable.
"""

from __future__ import annotations

import re

from forged.checkpoint.errors import CheckpointException, storage_error

DETAIL_CHARS_MAX = 200
TOO_LONG, TOO_LATE, TOO_MANY = 408, 425, 429
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,400})</Message>")
_URL_QUERY = re.compile(r"\?[^\s\"']*")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_NO_CREDENTIALS = re.compile(r"[Cc]redential|169\.254\.169\.254|metadata\.google|metadata/identity")
_DENIED = (401, 403)


def translated(error: Exception, url: str, name: str) -> CheckpointException:
    """The checkpoint error for an error of obstore."""
    text = str(error).partition("\n\nDebug source")[0]
    status, code = _found(_STATUS, text), _found(_CODE, text)
    if code in _NO_BUCKET:
        return storage_error(
            f"the bucket of {url} does not exist",
            name,
            "create the bucket, or correct the URL",
            code="checkpoint_bucket_missing",
        )
    if isinstance(error, FileNotFoundError):
        return storage_error(f"{name} does not exist in {url}", name, code="checkpoint_file_missing")
    if type(error).__name__ == "AlreadyExistsError":
        return storage_error(f"{name} exists already in {url}", name, "choose another name", code="checkpoint_exists")
    if type(error).__name__ in {"PermissionDeniedError", "UnauthenticatedError"} or _number(status) in _DENIED:
        return _denied(url, name, _detail(text, status, code))
    return _failed(text, url, name, _detail(text, status, code), _number(status))


def _denied(url: str, name: str, detail: str) -> CheckpointException:
    return storage_error(
        f"{url} denies access to {name or 'its names'}: {detail}",
        name,
        "check the credentials and their rights: read, write, list and delete",
        code="checkpoint_storage_denied",
    )


def _failed(text: str, url: str, name: str, detail: str, status: int) -> CheckpointException:
    if not status and _NO_CREDENTIALS.search(text):
        return storage_error(
            f"{url}: no credentials found: {detail}",
            name,
            "give credentials in the settings or in the environment (docs/checkpoint-storage.md)",
            code="checkpoint_credentials_missing",
        )
    may_pass = status >= 500 or status in {TOO_LONG, TOO_LATE, TOO_MANY} or (not status and "HTTP error" in text)
    if may_pass and "builder error" not in text:
        return storage_error(
            f"a request for {name or 'names'} to {url} failed: {detail}",
            name,
            "try again; check that the server runs and can be reached",
            code="checkpoint_storage_unreachable",
            retryable=True,
        )
    return storage_error(
        f"{url} refuses a request for {name or 'names'}: {detail}", name, code="checkpoint_storage_refused"
    )


def _detail(text: str, status: str, code: str) -> str:
    """A short form of the server's answer."""
    if status:
        return ", ".join(filter(None, [status, code, _found(_MESSAGE, text)]))[:DETAIL_CHARS_MAX]
    return _URL_QUERY.sub("", text.partition("\n")[0])[:DETAIL_CHARS_MAX]


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _number(status: str) -> int:
    return int(status or 0)
