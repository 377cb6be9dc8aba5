"""What an object store's refusals mean."""

from __future__ import annotations

import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from forged.checkpoint.errors import CheckpointException, ExceptionType
from forged.checkpoint.storage.object_store.object_errors import DETAIL_CHARS_MAX, translated


def answered(status: int, code: str, message: str = "") -> str:
    return (
        f"Generic S3 error: Error performing GET http://h/b/a?X-Amz-Signature=SECRET in 3ms - Server returned non-2xx "
        f"status code: {status} Whatever: <Error><Code>{code}</Code><Message>{message}</Message>"
        f"<StringToSign>SECRET</StringToSign></Error>\n\nDebug source:\nSECRET"
    )


NO_CONNECTION = (
    "Generic S3 error: Error performing PUT http://h/a?sig=SECRET in 1ms - HTTP error: error sending request"
)
NO_CREDENTIALS = (
    "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 3s - HTTP error: timed out"
)

CASES: list[tuple[Exception, str, bool]] = [
    (FileNotFoundError(answered(404, "NoSuchKey")), "checkpoint_file_missing", False),
    (FileNotFoundError(answered(404, "NoSuchBucket")), "checkpoint_bucket_missing", False),
    (GenericError(answered(404, "NoSuchBucket")), "checkpoint_bucket_missing", False),
    (FileNotFoundError(answered(404, "ContainerNotFound")), "checkpoint_bucket_missing", False),
    (AlreadyExistsError(answered(412, "PreconditionFailed")), "checkpoint_exists", False),
    (PermissionDeniedError(answered(403, "AccessDenied")), "checkpoint_storage_denied", False),
    (UnauthenticatedError(answered(401, "Expired")), "checkpoint_storage_denied", False),
    (GenericError(answered(403, "SignatureDoesNotMatch")), "checkpoint_storage_denied", False),
    (GenericError(answered(500, "InternalError")), "checkpoint_storage_unreachable", True),
    (GenericError(answered(503, "SlowDown")), "checkpoint_storage_unreachable", True),
    (GenericError(answered(429, "TooMany")), "checkpoint_storage_unreachable", True),
    (GenericError(answered(408, "RequestTimeout")), "checkpoint_storage_unreachable", True),
    (GenericError(answered(400, "InvalidRequest")), "checkpoint_storage_refused", False),
    (GenericError(answered(416, "InvalidRange")), "checkpoint_storage_refused", False),
    (GenericError(NO_CONNECTION), "checkpoint_storage_unreachable", True),
    (GenericError("Generic S3 error: - HTTP error: builder error"), "checkpoint_storage_refused", False),
    (GenericError(NO_CREDENTIALS), "checkpoint_credentials_missing", False),
    (NotSupportedError("no conditional put"), "checkpoint_storage_refused", False),
    (ValueError("Could not parse path"), "checkpoint_storage_refused", False),
    (GenericError(""), "checkpoint_storage_refused", False),
]


@pytest.mark.parametrize(("error", "code", "retryable"), CASES)
def test_object_store_error_is_translated_to_its_code_and_retryability(
    error: Exception, code: str, retryable: bool
) -> None:
    told = translated(error, "s3://bucket", "run/a")
    assert isinstance(told, CheckpointException)
    assert (told.code, told.retryable, told.type) == (code, retryable, ExceptionType.STORAGE_ERROR)
    assert told.checkpoint_path == "run/a"
    assert "s3://bucket" in told.message


@pytest.mark.parametrize("error", [error for error, _, _ in CASES])
def test_message_does_not_show_the_signature(error: Exception) -> None:
    assert "SECRET" not in str(translated(error, "s3://bucket", "run/a"))


def test_message_has_a_short_form_of_the_answer() -> None:
    told = translated(GenericError(answered(503, "SlowDown", "Please reduce your request rate.")), "s3://b", "a")
    assert "503, SlowDown, Please reduce your request rate." in told.message
    long = translated(GenericError(answered(503, "SlowDown", "x" * 399)), "s3://b", "a")
    assert len(long.message) < DETAIL_CHARS_MAX + 100
