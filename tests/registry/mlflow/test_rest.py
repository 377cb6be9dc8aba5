from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trustme

from forged.errors import ConfigError, ForgedError, PeerError, Unavailable
from forged.registry.mlflow import rest
from forged.registry.mlflow.conversion import FoundModel, FoundRegistry
from forged.registry.mlflow.rest import RETRIES
from tests.registry.mlflow.stub_server import Answer, Asked, as_json, not_found, stub_server


def read_server(url: str, environ: Mapping[str, str], **ports: Any) -> FoundRegistry:
    """Without pauses between attempts."""
    return rest.read_server(url, environ, **({"sleep": lambda _: None} | ports))


EMPTY: dict[str, dict[str, Any]] = {
    "registered-models/search": {},
    "model-versions/search": {},
}


def answering(**by_method: Any) -> Callable[[Asked], Answer]:
    """Answers by method, with `_` for `/` and `-`; an `Answer` as it is, another value as JSON."""
    answers = {name.replace("_", "-").replace("--", "/"): said for name, said in by_method.items()}

    def answer(asked: Asked) -> Answer:
        said = (EMPTY | answers).get(asked.method)
        if said is None:
            return not_found()
        return said if isinstance(said, Answer) else as_json(said)

    return answer


def failure(answer: Callable[[Asked], Answer], error: type[ForgedError], code: str) -> ForgedError:
    with stub_server(answer) as url, pytest.raises(error) as raised:
        read_server(url, {})
    assert raised.value.code == code
    return raised.value


# --- what is read -----------------------------------------------------------------------------------------------------


def test_empty_registry_has_nothing() -> None:
    with stub_server(answering()) as url:
        found = read_server(f"{url}/", {})
    assert (found.models, found.versions, found.metrics) == ({}, [], {})


def test_all_pages_are_read() -> None:
    def answer(asked: Asked) -> Answer:
        page = int(asked.fields.get("page_token", "0"))
        following = {"next_page_token": str(page + 1)} if page < 2 else {"next_page_token": ""}
        if asked.method == "registered-models/search":
            return as_json({"registered_models": [{"name": f"model-{page}"}], **following})
        assert asked.method == "model-versions/search"
        return as_json({"model_versions": [{"name": f"model-{page}", "version": "1"}], **following})

    with stub_server(answer) as url:
        found = read_server(url, {})
    assert list(found.models) == [one.name for one in found.versions] == ["model-0", "model-1", "model-2"]


def test_nulls_numbers_as_texts_and_unknown_fields_are_read() -> None:
    version = {
        "name": "a",
        "version": 3,
        "creation_timestamp": "1500",
        "description": None,
        "run_id": None,
        "other": [{}],
    }
    model = {"name": "a", "description": None, "aliases": [{"alias": "best", "version": 3}], "tags": [{"key": "empty"}]}
    answer = answering(
        registered_models__search={"registered_models": [model]}, model_versions__search={"model_versions": [version]}
    )
    with stub_server(answer) as url:
        found = read_server(url, {})
    assert found.models == {"a": FoundModel("a", "", {"empty": ""}, {"best": "3"})}
    assert (found.versions[0].version, found.versions[0].created_ms, found.versions[0].description) == ("3", 1500, "")


@pytest.mark.parametrize(("source", "is_asked"), [("models:/m-1", True), ("runs:/a/model", True), ("s3://b/a", False)])
def test_reference_is_followed_to_the_files(source: str, is_asked: bool) -> None:
    versions = {"model_versions": [{"name": "a", "version": "1", "source": source}]}
    answer = answering(
        model_versions__search=versions, model_versions__get_download_uri={"artifact_uri": "s3://b/found"}
    )
    with stub_server(answer) as url:
        [version] = read_server(url, {}).versions
    assert version.location == ("s3://b/found" if is_asked else "")


def test_metrics_of_each_run_are_read_once() -> None:
    asked_for: list[str] = []

    def answer(asked: Asked) -> Answer:
        if asked.method == "runs/get":
            asked_for.append(asked.fields["run_id"])
            return as_json({"run": {"data": {"metrics": [{"key": "a", "value": 0.5}, {"key": "b", "value": "NaN"}]}}})
        versions = [{"name": "a", "version": str(number), "run_id": "run"} for number in (1, 2)]
        return as_json({"model_versions": versions} if asked.method == "model-versions/search" else {})

    with stub_server(answer) as url:
        found = read_server(url, {})
    assert asked_for == ["run"]
    assert found.metrics["run"]["a"] == 0.5
    assert repr(found.metrics["run"]["b"]) == "nan"


def test_deleted_run_has_no_metrics() -> None:
    answer = answering(model_versions__search={"model_versions": [{"name": "a", "version": "1", "run_id": "gone"}]})
    with stub_server(answer) as url:
        assert read_server(url, {}).metrics == {"gone": {}}


# --- credentials ------------------------------------------------------------------------------------------------------

USER = {"MLFLOW_TRACKING_USERNAME": "ada", "MLFLOW_TRACKING_PASSWORD": "secret"}
BASIC = f"Basic {base64.b64encode(b'ada:secret').decode()}"


@pytest.mark.parametrize(
    ("environ", "header"),
    [
        ({}, None),
        ({"MLFLOW_TRACKING_TOKEN": "secret"}, "Bearer secret"),
        (USER, BASIC),
        (
            {"MLFLOW_TRACKING_USERNAME": "ada", "MLFLOW_TRACKING_PASSWORD": "secret", "MLFLOW_TRACKING_TOKEN": "a"},
            BASIC,
        ),
    ],
)
def test_credentials_of_the_environment_are_sent(environ: dict[str, str], header: str | None) -> None:
    sent: list[str | None] = []

    def answer(asked: Asked) -> Answer:
        sent.append(asked.headers.get("Authorization"))
        return as_json({})

    with stub_server(answer) as url:
        read_server(url, environ)
    assert set(sent) == {header}


@pytest.mark.parametrize("status", [401, 403])
def test_refused_access_names_the_variables(status: int) -> None:
    error = failure(lambda _: Answer(b"<html>", status), ConfigError, "mlflow_access_denied")
    assert "MLFLOW_TRACKING_TOKEN" in error.fix


def test_redirect_is_not_followed() -> None:
    asked: list[Asked] = []

    def elsewhere(request: Asked) -> Answer:
        asked.append(request)
        return as_json({})

    with (
        stub_server(elsewhere) as other,
        stub_server(lambda _: Answer(b"", 302, {"Location": other})) as url,
        pytest.raises(ConfigError, match="redirects to") as raised,
    ):
        read_server(url, {"MLFLOW_TRACKING_TOKEN": "secret"})
    assert raised.value.code == "mlflow_moved"
    assert asked == []


@pytest.mark.parametrize("token", ["a\nb", "ä"])
def test_token_that_no_header_can_carry_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_TOKEN") as raised:
        read_server("http://127.0.0.1:1", {"MLFLOW_TRACKING_TOKEN": token})
    assert token not in str(raised.value)


def test_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_CLIENT_CERT_PATH"):
        with pytest.raises(ConfigError, match=name):
            read_server("https://127.0.0.1:1", {name: str(tmp_path / "missing.pem")})


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://", "is no URL"),
        ("http://host:port", "is no URL"),
        ("http://ho st", "is no URL"),
        ("http://host\n", "is no URL"),
        ("http://host/#/models", "must end before"),
        ("http://host?a=b", "must end before"),
    ],
)
def test_url_that_is_not_of_a_server_is_refused(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        read_server(url, {})
    assert raised.value.code == "mlflow_source_invalid"


def test_password_in_a_url_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError) as raised:
        read_server("https://ada:secret@host", {})
    assert "secret" not in str(raised.value)


# --- hostile answers --------------------------------------------------------------------------------------------------

WRONG: list[Any] = [
    Answer(b""),
    Answer(b"<html></html>"),
    Answer(b"[]"),
    Answer(b"null"),
    Answer(b"\xff\xfe"),
    Answer(b"[" * 100_000),
    Answer(b"{}" + b" " * 10 + b"{}"),
    Answer(b'{"model_versions": [', length=10_000),
    {"model_versions": {}},
    {"model_versions": [None]},
    {"model_versions": [{"name": "a"}]},
    {"model_versions": [{"name": 1, "version": "1"}]},
    {"model_versions": [{"name": "a", "version": "1", "tags": {"a": "b"}}]},
    {"model_versions": [{"name": "a", "version": "1", "creation_timestamp": "yesterday"}]},
    {"model_versions": [{"name": "a", "version": "1", "creation_timestamp": -1}]},
    {"model_versions": [], "next_page_token": 7},
    Answer(b"{}", 418),
    Answer(b"{}", 404),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: str(one)[:60])
def test_answer_of_another_kind_is_a_typed_error(wrong: Any) -> None:
    error = failure(answering(model_versions__search=wrong), PeerError, "mlflow_answer_invalid")
    assert "is not that of an MLflow registry" in error.message
    assert len(error.message) < 1_000


def test_pages_without_an_end_are_refused() -> None:
    error = failure(
        answering(registered_models__search={"next_page_token": "again"}), PeerError, "mlflow_answer_invalid"
    )
    assert "its pages have no end" in error.message


def test_huge_answer_is_refused_while_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "ANSWER_BYTES_MAX", 1_000_000)
    huge = Answer(b"[" * 2_000_000, length=1 << 40)
    assert "more than 1,000,000 bytes" in failure(lambda _: huge, PeerError, "mlflow_answer_invalid").message


def test_answer_that_takes_too_long_is_given_up() -> None:
    ticking = count(0.0, 200.0)
    with stub_server(answering()) as url, pytest.raises(Unavailable, match="takes longer than 120 s"):
        read_server(url, {}, clock=lambda: next(ticking))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failure_of_the_server_can_be_tried_again(status: int) -> None:
    said = Answer(json.dumps({"error_code": "INTERNAL_ERROR", "message": "no room"}).encode(), status)
    error = failure(lambda _: said, Unavailable, "mlflow_unavailable")
    assert f"status {status} INTERNAL_ERROR no room" in error.message


def test_question_is_asked_again_after_a_failure() -> None:
    pauses: list[float] = []
    failures = iter([Answer(b"", 500), Answer(b"", 503), Answer(b"", 429)])
    with stub_server(lambda _: next(failures, as_json({}))) as url:
        assert read_server(url, {}, sleep=pauses.append).versions == []
    assert pauses == [1.0, 2.0, 4.0] == list(RETRIES.delays(lambda: 0.0))


def test_metric_that_is_no_number_is_a_typed_error() -> None:
    answer = answering(
        model_versions__search={"model_versions": [{"name": "a", "version": "1", "run_id": "run"}]},
        runs__get={"run": {"data": {"metrics": [{"key": "a", "value": "much"}]}}},
    )
    assert "a metric of run run is no number" in failure(answer, PeerError, "mlflow_answer_invalid").message


def test_server_that_is_not_there_can_be_tried_again() -> None:
    with stub_server(answering()) as url:
        pass
    with pytest.raises(Unavailable) as raised:
        read_server(url, {})
    assert raised.value.code == "mlflow_unavailable"


def test_server_that_speaks_another_protocol_is_a_typed_error() -> None:
    with stub_server(answering()) as url, pytest.raises((Unavailable, PeerError)) as raised:
        read_server(url.replace("http://", "https://"), {})
    assert raised.value.code in ("mlflow_unavailable", "mlflow_answer_invalid")


def test_certificate_of_the_named_authority_is_trusted_and_no_other(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with stub_server(answering(), context) as url:
        with pytest.raises(ConfigError) as raised:
            read_server(url, {})
        found = read_server(url, {"MLFLOW_TRACKING_SERVER_CERT_PATH": str(tmp_path / "ca.pem")})
    assert raised.value.code == "mlflow_certificate_refused"
    assert found.versions == []
