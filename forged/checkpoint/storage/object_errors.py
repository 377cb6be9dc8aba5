"""What an object store's refusals mean.

Law: of a server's answer its status, its code and one sentence are told, never its whole, which may say how a request
was signed. What may pass by itself is retryable: no answer, an answer too late, and an answer that says so.
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
    """The error that a call of obstore's has raised, in words of ours."""
    text = str(error).partition("\n\nDebug source")[0]
    status, code = _found(_STATUS, text), _found(_CODE, text)
    if code in _NO_BUCKET:
        return storage_error(
            f"there is no bucket for {url}",
            name,
            "create the bucket, or mend the URL",
            code="checkpoint_bucket_missing",
        )
    if isinstance(error, FileNotFoundError):
        return storage_error(f"there is no {name} in {url}", name, code="checkpoint_file_missing")
    if type(error).__name__ == "AlreadyExistsError":
        return storage_error(f"there is {name} in {url} already", name, "choose another name", code="checkpoint_exists")
    if type(error).__name__ in {"PermissionDeniedError", "UnauthenticatedError"} or _number(status) in _DENIED:
        return _denied(url, name, _told(text, status, code))
    return _failed(text, url, name, _told(text, status, code), _number(status))


def _denied(url: str, name: str, told: str) -> CheckpointException:
    return storage_error(
        f"{url} does not let us at {name or 'its names'}: {told}",
        name,
        "check the credentials, and what they may do: read, write, list and delete",
        code="checkpoint_storage_denied",
    )


def _failed(text: str, url: str, name: str, told: str, status: int) -> CheckpointException:
    if not status and _NO_CREDENTIALS.search(text):
        return storage_error(
            f"{url}: no credentials were found: {told}",
            name,
            "give credentials in the settings or in the environment (docs/checkpoint-storage.md)",
            code="checkpoint_credentials_missing",
        )
    may_pass = status >= 500 or status in {TOO_LONG, TOO_LATE, TOO_MANY} or (not status and "HTTP error" in text)
    if may_pass and "builder error" not in text:
        return storage_error(
            f"{url} has not done what was asked of {name or 'it'}: {told}",
            name,
            "try again; if it stays so, see whether its server is up and can be reached",
            code="checkpoint_storage_unreachable",
            retryable=True,
        )
    return storage_error(
        f"{url} refuses what was asked of {name or 'it'}: {told}", name, code="checkpoint_storage_refused"
    )


def _told(text: str, status: str, code: str) -> str:
    """What the server has said, in brief."""
    if status:
        return ", ".join(filter(None, [status, code, _found(_MESSAGE, text)]))[:DETAIL_CHARS_MAX]
    return _URL_QUERY.sub("", text.partition("\n")[0])[:DETAIL_CHARS_MAX]


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _number(status: str) -> int:
    return int(status or 0)
