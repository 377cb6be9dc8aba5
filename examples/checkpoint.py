"""Save and load a checkpoint, without a daemon.

python examples/checkpoint.py [DIRECTORY]
"""

import sys

import numpy as np

import forged.checkpoint

DIRECTORY = sys.argv[1] if len(sys.argv) > 1 else "checkpoints"

weights = np.arange(8, dtype=np.float32)
forged.checkpoint.save(f"{DIRECTORY}/step-100", {"w": weights, "step": 100})

loaded = forged.checkpoint.load(f"{DIRECTORY}/step-100")
assert np.array_equal(loaded["w"], weights)
print(f"loaded step {loaded['step']}")
