"""Fills the registry of an MLflow server through MLflow's own client, where that is installed.

    python make_registry.py URL

Whatever a version of MLflow does not have, such as aliases, is left out.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from mlflow.tracking import MlflowClient  # type: ignore[import-not-found,unused-ignore]

LONG = "## Recogniser\n\nTrained on *all* hours.\n\tSee the run."


def main(url: str) -> None:
    client = MlflowClient(tracking_uri=url, registry_uri=url)
    run_ids = [run(client, number) for number in range(3)]
    client.create_registered_model("speech recogniser", {"task": "speech"}, LONG)
    client.create_registered_model("classifier")
    client.create_registered_model("no:colon" if is_allowed(client, "no:colon") else "no@sign")
    client.create_registered_model("without versions")
    for number in range(4):
        version(client, "speech recogniser", run_ids[min(number, 2)], number)
    version(client, "classifier", run_ids[0], 9)
    odd = next(one.name for one in client.search_registered_models() if one.name.startswith("no"))
    client.create_model_version(odd, "s3://models/odd")
    stages(client)
    aliases(client)
    client.delete_model_version("speech recogniser", "4")
    client.delete_run(run_ids[2])
    logged_model(client, run_ids[0])


def is_allowed(client: Any, name: str) -> bool:
    try:
        client.create_registered_model(name)
        client.delete_registered_model(name)
    except Exception as error:  # noqa: BLE001 - whatever this version raises
        print(f"{name} is refused: {error}")
        return False
    return True


def run(client: Any, number: int) -> str:
    made = client.create_run("0")
    run_id = str(made.info.run_id)
    for step in range(3):
        client.log_metric(run_id, "accuracy", 0.5 + step / 10 + number / 100, step=step)
    client.log_metric(run_id, "loss", math.nan if number == 1 else 1.0)
    client.log_metric(run_id, "largest", math.inf)
    return run_id


def version(client: Any, name: str, run_id: str, number: int) -> None:
    made = client.create_model_version(
        name,
        f"s3://models/{number}" if number % 2 else f"{client.get_run(run_id).info.artifact_uri}/model",
        run_id,
        tags={"team": "vision", "empty": "", "sign ü": f"value {number}"},
        description=LONG if number == 1 else None,
    )
    print(name, made.version)


def stages(client: Any) -> None:
    for number, stage in ((1, "Archived"), (2, "Production"), (3, "Staging")):
        client.transition_model_version_stage("speech recogniser", str(number), stage)


def aliases(client: Any) -> None:
    if not hasattr(client, "set_registered_model_alias"):
        return
    for alias, number in (("champion", "2"), ("Challenger", "3"), ("best-so_far", "2"), ("gone", "4")):
        client.set_registered_model_alias("speech recogniser", alias, number)


def logged_model(client: Any, run_id: str) -> None:
    """A version whose source is a reference."""
    if hasattr(client, "create_logged_model"):
        model = client.create_logged_model("0", name="logged", source_run_id=run_id)
        client.finalize_logged_model(model.model_id, "READY")
        client.create_model_version("classifier", f"models:/{model.model_id}", run_id, model_id=model.model_id)


if __name__ == "__main__":
    main(sys.argv[1])
