"""Where a path, a URL or settings lead."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from forged.checkpoint.errors import CheckpointException
from forged.checkpoint.model import StorageOptions
from forged.checkpoint.storage.local import LocalStorage
from forged.checkpoint.storage.locations import OF_EVERY_BUCKET, PROVIDERS, create_storage, root_at, storage_at
from forged.checkpoint.storage.object_store.objects import ObjectStorage
from tests.checkpoint.fixtures.s3_server import S3Server

GOOGLE = {
    "service_account_key": '{"private_key": "private_key", "private_key_id": "id", "client_email": "e", '
    '"disable_oauth": true}'
}
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}


def refused(options: StorageOptions, environment: Mapping[str, str] | None = None) -> CheckpointException:
    with pytest.raises(CheckpointException) as caught:
        create_storage(options, environment or {})
    assert caught.value.code == "checkpoint_storage_invalid"
    return caught.value


def test_options_of_another_type_are_refused() -> None:
    assert "str" in refused("checkpoints").message  # type: ignore[arg-type]


# Paths and URLs.


@pytest.mark.parametrize(
    ("where", "folder", "name"),
    [
        ("step-100", "", "step-100"),
        ("runs/step-100", "runs", "step-100"),
        ("./runs//step-100/", "runs", "step-100"),
        ("runs/step-100.metadata.json", "runs", "step-100"),
        (Path("runs") / "step-100", "runs", "step-100"),
        ("a folder/ü/step-100", "a folder/ü", "step-100"),
    ],
)
def test_a_path_is_a_directory_and_a_name(
    where: str | Path, folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage, found = storage_at(where)
    assert isinstance(storage, LocalStorage)
    assert (storage.url, found) == (str(tmp_path / folder), name)


@pytest.mark.parametrize(
    ("where", "url"),
    [
        ("/step-100", "/"),
        ("/srv/runs/step-100", "/srv/runs"),
        ("file:///srv/runs/step-100", "/srv/runs"),
        ("file://localhost/srv/a%20b/step-100.metadata.json", "/srv/a b"),
        ("file:///step-100", "/"),
        ("memory://run/step-100", "memory://run"),
        ("memory://run/a/step-100", "memory://run/a"),
        ("s3://bucket/step-100", "s3://bucket"),
        ("s3://bucket/a/b/step-100", "s3://bucket/a/b"),
        ("S3://bucket/a/b/step-100.metadata.json", "s3://bucket/a/b"),
        ("az://container/a/step-100", "az://container/a"),
    ],
)
def test_a_url_leads_where_it_says(where: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in AZURE.items():
        monkeypatch.setenv(key, value)
    storage, name = storage_at(where)
    assert (storage.url, name) == (url, "step-100")
    assert isinstance(storage, LocalStorage if url.startswith("/") else ObjectStorage)


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("", "checkpoint_location_invalid"),
        ("/", "checkpoint_location_invalid"),
        ("s3://bucket", "checkpoint_location_invalid"),
        ("s3://bucket/", "checkpoint_location_invalid"),
        ("memory://name", "checkpoint_location_invalid"),
        ("ftp://host/a/b", "checkpoint_location_invalid"),
        ("s3:///a/b", "checkpoint_location_invalid"),
        ("file://host/a/b", "checkpoint_location_invalid"),
        (".", "checkpoint_prefix_invalid"),
        ("runs/..", "checkpoint_prefix_invalid"),
        ("runs/a b", "checkpoint_prefix_invalid"),
        ("s3://bucket/a?versionId=3", "checkpoint_prefix_invalid"),
        ("s3://bucket/../b/step", "checkpoint_name_invalid"),
        ("s3://bucket/a//b/step", "checkpoint_name_invalid"),
    ],
)
def test_invalid_checkpoint_location_is_refused(where: str, code: str) -> None:
    with pytest.raises(CheckpointException) as caught:
        storage_at(where)
    assert caught.value.code == code
    assert caught.value.fix


def test_a_folder_is_a_storage(tmp_path: Path) -> None:
    assert root_at(tmp_path).url == str(tmp_path)
    assert root_at(f"file://{tmp_path}/").url == str(tmp_path)
    assert root_at("s3://bucket/").url == "s3://bucket"
    assert root_at("s3://bucket/runs/").url == "s3://bucket/runs"
    assert root_at("memory://run").url == "memory://run"


def test_the_same_name_is_the_same_memory() -> None:
    storage, name = storage_at("memory://test_locations/step-1")
    storage.publish(f"{name}.metadata.json", b"x")
    again = create_storage(StorageOptions("memory", {"name": "test_locations"}))
    assert [entry.name for entry in again.entries()] == ["step-1.metadata.json"]
    assert list(root_at("memory://test_locations_2").entries()) == []


def test_nothing_is_made_before_it_is_written_to(tmp_path: Path) -> None:
    storage_at(tmp_path / "runs" / "step-1")
    assert list(tmp_path.iterdir()) == []


# Settings.


def test_without_settings_checkpoints_lie_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert create_storage(StorageOptions()).url == str(tmp_path / "checkpoints")
    assert create_storage(StorageOptions("local", {})).url == str(tmp_path / "checkpoints")
    assert create_storage(StorageOptions("local", {"base_path": "x"})).url == str(tmp_path / "x")


def test_settings_that_it_has_not_are_all_named() -> None:
    error = refused(StorageOptions("local", {"base_path": "x", "bucket": "b", "region": "r"}))
    assert "unknown setting bucket" in error.message
    assert "unknown setting region" in error.message
    assert "base_path" in error.fix
    error = refused(StorageOptions("s3", {"bucket": "b", "base_path": "x"}))
    assert "unknown setting base_path" in error.message
    assert "region" in error.fix


def test_a_provider_that_there_is_not_is_refused() -> None:
    assert "'floppy'" in refused(StorageOptions("floppy", {})).message


@pytest.mark.parametrize(
    ("provider", "settings", "says"),
    [
        ("s3", {}, "bucket"),
        ("s3", {"bucket": ""}, "bucket"),
        ("s3", {"bucket": "b", "timeout_s": "soon"}, "timeout_s"),
        ("s3", {"bucket": "b", "retries": "-1"}, "retries"),
        ("s3", {"bucket": "b", "unsigned_payload": "perhaps"}, "perhaps"),
        ("s3", {"bucket": "b", "region": 3}, "region must be a string"),
        ("az", {"bucket": "b"}, "Account must be specified"),
        ("gs", {"bucket": "b", "service_account": "/no/such/file"}, "/no/such/file"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    provider: str, settings: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in [*os.environ]:
        if key.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(key)
    assert says in refused(StorageOptions(provider, settings)).message


@pytest.mark.parametrize(
    ("provider", "setting"), [(name, key) for name, provider in PROVIDERS.items() for key in provider.settings]
)
def test_every_setting_is_one_of_its_store(provider: str, setting: str) -> None:
    """Its own checks may refuse a value, but not the name."""
    said = ""
    try:
        create_storage(StorageOptions(provider, {"bucket": "b", setting: "true"}), {})
    except CheckpointException as error:
        said = error.message
    assert "is not valid for store" not in said


def test_google_and_azure_take_their_credentials_from_the_settings() -> None:
    google = create_storage(StorageOptions("gs", {"bucket": "b", "prefix": "/run/", **GOOGLE}))
    azure = create_storage(StorageOptions("az", {"bucket": "b", "account_name": "a", "account_key": "a2V5"}))
    assert (google.url, azure.url) == ("gs://b/run", "az://b")


def test_settings_are_not_shown() -> None:
    assert "SECRET" not in repr(StorageOptions("s3", {"secret_access_key": "SECRET"}))


def test_settings_lead_to_a_server(s3_server: S3Server) -> None:
    bucket = s3_server.bucket()
    options = StorageOptions(
        "s3", {**s3_server.settings(bucket), "prefix": "runs/7", "timeout_s": "20", "retries": "1"}
    )
    create_storage(options, {}).publish("step-1.metadata.json", b"x")
    assert [entry.name for entry in s3_server.storage(bucket).entries()] == ["runs/7/step-1.metadata.json"]


def test_the_environment_leads_to_a_server(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in s3_server.environment().items():
        monkeypatch.setenv(key, value)
    bucket = s3_server.bucket()
    storage, name = storage_at(f"s3://{bucket}/runs/7/step-1")
    storage.publish(f"{name}.metadata.json", b"x")
    assert [entry.name for entry in root_at(f"s3://{bucket}/runs").entries()] == ["7/step-1.metadata.json"]


def test_missing_extra_is_reported_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(CheckpointException) as caught:
        root_at("s3://bucket/run")
    assert caught.value.code == "checkpoint_storage_missing"
    assert "forged-ml[cloud]" in caught.value.fix
    assert root_at("/tmp").url == "/tmp"


def test_the_page_on_storages_names_every_setting() -> None:
    page = (Path(__file__).parents[3] / "docs" / "checkpoint-storage.md").read_text()
    told: dict[str, set[str]] = {}
    for providers, settings in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (`.*) \|$", page, re.MULTILINE):
        for provider in re.findall(r"`(\w+)`", providers):
            told.setdefault(provider, set()).update(re.findall(r"`(\w+)`", settings))
    assert told == {
        "local": {"base_path"},
        "memory": {"name"},
        **{name: {*provider.settings, *OF_EVERY_BUCKET} for name, provider in PROVIDERS.items()},
    }
