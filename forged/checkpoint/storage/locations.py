"""Makes the storage for a path, a URL, or settings.

Invariants:
- Every setting is used, or the error names all settings that cannot be.
- No server is contacted here.
- Local directories work without the extra for object stores.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from forged.checkpoint.errors import CheckpointException, ExceptionType, invalid
from forged.checkpoint.format.manifest import SUFFIX
from forged.checkpoint.format.names import check_name
from forged.checkpoint.model import StorageOptions, check_prefix
from forged.checkpoint.ports import Storage
from forged.checkpoint.storage.local import LocalStorage
from forged.checkpoint.storage.object_store.objects import ObjectStorage

if TYPE_CHECKING:
    from obstore.store import ObjectStore

REQUEST_TIMEOUT_S = 60.0
"""For one request of a few MiB."""
CONNECT_TIMEOUT_S = 5.0
RETRIES = 5
RETRIED_FOR_S = 60.0
LOCAL, MEMORY, FILE = "local", "memory", "file"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)", re.DOTALL)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@dataclass(frozen=True, slots=True)
class Provider:
    """A kind of object store: obstore's class, and its settings with obstore's names for them."""

    store: str
    settings: Mapping[str, str]


def _same(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


PROVIDERS: Mapping[str, Provider] = {
    "s3": Provider(
        "S3Store",
        _same(
            "endpoint",
            "region",
            "access_key_id",
            "secret_access_key",
            "session_token",
            "skip_signature",
            "virtual_hosted_style_request",
            "unsigned_payload",
            "disable_bulk_delete",
            "checksum_algorithm",
            "server_side_encryption",
            "sse_kms_key_id",
        ),
    ),
    "gs": Provider(
        "GCSStore",
        {
            "endpoint": "base_url",
            **_same("service_account", "service_account_key", "application_credentials", "skip_signature"),
        },
    ),
    "az": Provider(
        "AzureStore",
        _same(
            "endpoint",
            "account_name",
            "account_key",
            "sas_key",
            "tenant_id",
            "client_id",
            "client_secret",
            "use_azure_cli",
            "use_emulator",
            "skip_signature",
        ),
    ),
}
OF_EVERY_BUCKET = frozenset({"bucket", "prefix", "timeout_s", "retries"})
_memories: dict[str, ObjectStore] = {}
_memories_lock = threading.Lock()


def create_storage(options: StorageOptions, environment: Mapping[str, str] = os.environ) -> Storage:
    """The storage for the options. The environment supplies the rest, under the names that other tools use."""
    if not isinstance(options, StorageOptions):
        raise _refused(f"storage options must be StorageOptions, got {type(options).__name__}", "give StorageOptions")
    settings = options.connection_settings
    known = _settings_of(options.provider)
    problems = [f"unknown setting {key}" for key in sorted(set(settings) - known)]
    problems += [
        f"{key} must be a string" for key in sorted(known & set(settings)) if not isinstance(settings[key], str)
    ]
    if problems:
        raise _refused(
            f"storage {options.provider}: {', '.join(problems)}", f"known settings: {', '.join(sorted(known))}"
        )
    if options.provider == LOCAL:
        return LocalStorage(settings.get("base_path", "./checkpoints"))
    if options.provider == MEMORY:
        return _memory(settings.get("name", ""))
    return _bucket(options.provider, settings, environment)


def storage_at(where: str | os.PathLike[str], environment: Mapping[str, str] = os.environ) -> tuple[Storage, str]:
    """The storage of a checkpoint and its prefix there.

    `where` is a path or a URL such as s3://bucket/run/step-100, of the checkpoint or of its manifest.
    """
    text = os.fspath(where).removesuffix(SUFFIX).rstrip("/")
    folder, slash, name = text.rpartition("/")
    if not name or folder.endswith(":/"):
        raise invalid(
            f"{os.fspath(where)!r} is not a checkpoint location",
            "give the folder and the checkpoint's name, such as runs/step-100 or s3://bucket/step-100",
            code="checkpoint_location_invalid",
        )
    return root_at((folder or slash) if slash else ".", environment), check_prefix(name)


def root_at(where: str | os.PathLike[str], environment: Mapping[str, str] = os.environ) -> Storage:
    """The storage for a directory or a folder of a bucket."""
    text = os.fspath(where)
    match = _URL.fullmatch(text)
    if match is None:
        return LocalStorage(text)
    scheme, host, path = match[1].lower(), match[2], match[3].rstrip("/")
    if scheme == FILE:
        return _file(text, host, path)
    if scheme == MEMORY:
        return _memory(f"{host}/{path}".strip("/"))
    if scheme not in PROVIDERS or not host:
        raise invalid(
            f"{text!r} is not a storage",
            "use a path, file:///path, s3://bucket/path, gs://bucket/path, az://container/path or memory://name",
            code="checkpoint_location_invalid",
        )
    return create_storage(StorageOptions(scheme, {"bucket": host, **({"prefix": path} if path else {})}), environment)


def _settings_of(provider: str) -> frozenset[str]:
    if provider == LOCAL:
        return frozenset({"base_path"})
    if provider == MEMORY:
        return frozenset({"name"})
    if provider not in PROVIDERS:
        raise _refused(f"unknown storage provider {provider!r}", f"use {', '.join([LOCAL, *PROVIDERS])} or {MEMORY}")
    return OF_EVERY_BUCKET | set(PROVIDERS[provider].settings)


def _file(text: str, host: str, path: str) -> Storage:
    if host not in {"", "localhost"}:
        raise invalid(f"{text!r} names a host", "file URLs begin with file:///", code="checkpoint_location_invalid")
    return LocalStorage("/" + unquote(path))


def _memory(name: str) -> Storage:
    """A named store in this process's memory; it lives as long as the process."""
    stores = _obstore()
    with _memories_lock:
        store = _memories.setdefault(name, stores.MemoryStore())
    return ObjectStorage(store, f"memory://{name}")


def _bucket(provider: str, settings: Mapping[str, str], environment: Mapping[str, str]) -> Storage:
    names = PROVIDERS[provider].settings
    bucket, prefix = settings.get("bucket", ""), settings.get("prefix", "").strip("/")
    if not bucket:
        raise _refused(f"storage {provider}: bucket is missing", "set `bucket`")
    config = {names[key]: value for key, value in settings.items() if key in names}
    url = f"{provider}://{bucket}/{check_name(prefix)}" if prefix else f"{provider}://{bucket}"
    make = getattr(_obstore(), PROVIDERS[provider].store)
    client, retry = _client_options(provider, settings, environment), _retry_config(settings)
    try:
        store = make(bucket, prefix=prefix or None, client_options=client, retry_config=retry, config=config)
    except Exception as error:  # noqa: BLE001 - obstore checks its settings with exceptions of its own
        raise _refused(
            f"{url}: {str(error).partition(chr(10))[0]}", "correct the settings or the environment"
        ) from None
    return ObjectStorage(store, url)


def _client_options(
    provider: str, settings: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, bool | timedelta]:
    endpoint = settings.get("endpoint", "")
    if provider == "s3" and not endpoint:
        endpoint = next(filter(None, map(environment.get, _ENDPOINTS)), "")
    return {
        # An endpoint with http:// is an explicit choice.
        "allow_http": endpoint.startswith("http://") or settings.get("use_emulator") == "true",
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=_number(settings, "timeout_s", REQUEST_TIMEOUT_S)),
    }


def _retry_config(settings: Mapping[str, str]) -> dict[str, int | timedelta]:
    return {
        "max_retries": int(_number(settings, "retries", RETRIES)),
        "retry_timeout": timedelta(seconds=RETRIED_FOR_S),
    }


def _number(settings: Mapping[str, str], key: str, otherwise: float) -> float:
    text = settings.get(key, f"{otherwise}")
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text):
        raise _refused(f"{key} = {text!r} is not a number", "give a number such as 60")
    return float(text)


def _obstore() -> Any:
    """Obstore's stores, which take a while to import."""
    try:
        from obstore import store
    except ImportError:
        raise CheckpointException(
            "object stores need the library obstore, which is not installed",
            type=ExceptionType.STORAGE_ERROR,
            code="checkpoint_storage_missing",
            fix="pip install 'forged-ml[cloud]'",
        ) from None
    return store


def _refused(message: str, fix: str) -> CheckpointException:
    return invalid(message, fix, code="checkpoint_storage_invalid")
