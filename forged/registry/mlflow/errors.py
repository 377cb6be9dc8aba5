"""What can be wrong with an MLflow registry that is to be read."""

from __future__ import annotations

from forged.errors import ConfigError, PeerError, Unavailable

SHOWN_CHARS = 300


def source_invalid(source: str, problem: str) -> ConfigError:
    return ConfigError(
        "mlflow_source_invalid",
        f"{source[:SHOWN_CHARS]!r} {problem}",
        "name the URL of an MLflow server, such as https://mlflow.example, or the SQLite file of one",
    )


def file_invalid(path: str, problem: str) -> ConfigError:
    return ConfigError(
        "mlflow_file_invalid",
        f"{path} cannot be read as an MLflow database: {problem}",
        "name the file of the server's --backend-store-uri sqlite:///FILE",
    )


def setting_invalid(name: str, problem: str) -> ConfigError:
    return ConfigError("mlflow_setting_invalid", f"the environment variable {name} {problem}", f"correct {name}")


def access_denied(url: str, status: int) -> ConfigError:
    return ConfigError(
        "mlflow_access_denied",
        f"{url} refuses access (status {status})",
        "set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
    )


def moved(url: str, target: str) -> ConfigError:
    return ConfigError(
        "mlflow_moved", f"{url} redirects to {target[:SHOWN_CHARS]!r}", "name the URL of the server that it leads to"
    )


def certificate_refused(url: str, problem: str) -> ConfigError:
    return ConfigError(
        "mlflow_certificate_refused",
        f"the certificate of {url} is not trusted: {problem}",
        "set MLFLOW_TRACKING_SERVER_CERT_PATH to the certificate of its authority",
    )


def answer_invalid(url: str, problem: str) -> PeerError:
    text = f"the answer of {url} is not that of an MLflow registry: {problem[:SHOWN_CHARS]}"
    return PeerError("mlflow_answer_invalid", text, "check that the URL is that of an MLflow server")


def unavailable(url: str, problem: str) -> Unavailable:
    return Unavailable("mlflow_unavailable", f"{url} cannot be read: {problem[:SHOWN_CHARS]}", "try again")
