"""Register a checkpoint as a model, record what was measured of it, and promote it until it serves.

python examples/release_model.py ENDPOINT [DIRECTORY]
"""

import sys
import time

import numpy as np

import forged.checkpoint
from forged.client import BlockingClient
from forged.registry import DeploymentState

ENDPOINT = sys.argv[1]
PLACE = f"{sys.argv[2] if len(sys.argv) > 2 else 'checkpoints'}/step-100"

weights = np.eye(10)
forged.checkpoint.save(PLACE, {"model": {"w": weights}}, step=100)


def latency_ms() -> float:
    began_at = time.perf_counter()
    weights @ np.ones(10)
    return (time.perf_counter() - began_at) * 1000


with BlockingClient(ENDPOINT) as client:
    model = client.register_model("digits", checkpoint=PLACE, input_shape=[10], output_shape=[10], framework="numpy")
    client.validate_model(
        "digits",
        model.version,
        passed=True,
        accuracy=1.0,
        samples_ms=[latency_ms() for _ in range(100)],
        checkpoint=PLACE,
    )
    while model.state is not DeploymentState.PRODUCTION:
        model = client.promote_model("digits", model.version, reason="first release")
    serving = client.model("digits", "serving").metadata
    print(f"{serving.model_id}@{serving.version} serves")
    for entry in client.model_journal("digits"):
        print(entry.number, entry.version, entry.kind, entry.was, entry.now)
