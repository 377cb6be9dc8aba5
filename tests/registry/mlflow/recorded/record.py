"""Records a server's answers, and the tables of its SQLite file.

    python -m tests.registry.mlflow.recorded.record NAME URL FILE

The server is one of MLflow, filled by `make_registry.py`, with FILE behind it.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

from forged.registry.mlflow.rest import read_server
from tests.registry.mlflow.stub_server import PREFIX, Answer, Asked, stub_server

FOLDER = Path(__file__).parent
TABLES = (
    *("registered_models", "registered_model_tags", "registered_model_aliases"),
    *("model_versions", "model_version_tags", "latest_metrics", "alembic_version"),
)


def main(name: str, url: str, file: str) -> None:
    recorded = FOLDER / f"mlflow-{name}.json"
    recorded.write_text(json.dumps(answers(url), indent=1, sort_keys=True) + "\n")
    (FOLDER / f"mlflow-{name}.sql").write_text("".join(f"{line}\n" for line in statements(Path(file))))


def answers(url: str) -> list[dict[str, Any]]:
    """Each request of a reader with its answer."""
    found: list[dict[str, Any]] = []

    def forward(asked: Asked) -> Answer:
        try:
            with urlopen(f"{url}{PREFIX}{asked.method}?{urlencode(asked.fields)}", timeout=60) as response:
                status, body = response.status, response.read()
        except HTTPError as error:
            status, body = error.code, error.read()
        found.append({"method": asked.method, "fields": asked.fields, "status": status, "body": json.loads(body)})
        return Answer(body, status)

    with stub_server(forward) as proxy:
        read_server(proxy, {})
    return found


def statements(path: Path) -> list[str]:
    """The tables of the registry as SQL."""
    with closing(sqlite3.connect(path)) as connection, closing(sqlite3.connect(":memory:")) as copy:
        connection.backup(copy)
        for (table,) in copy.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
            if table not in TABLES:
                copy.execute(f'DROP TABLE "{table}"')
        return list(copy.iterdump())


if __name__ == "__main__":
    main(*sys.argv[1:])
