"""PyTorch with forged: tensors, modules and optimizers as training state, and elastic training of torch scripts.

import forged.torch as ft

Needs torch: `pip install 'forged-ml[torch]'`. No other package of forged imports torch or this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forged.torch.checkpoints import Checkpoints
    from forged.torch.ddp import ElasticDDP, all_reduce_gradients
    from forged.torch.frameworks.lightning import ForgedStrategy
    from forged.torch.frameworks.trainer import Trainer, TrainingArguments
    from forged.torch.group import ProcessGroups, init_process_group
    from forged.torch.loader import Loader, Shards
    from forged.torch.run import Run, join
    from forged.torch.run_step import RunStep
    from forged.torch.state import State
    from forged.torch.tensors import array_of, tensor_of

__all__ = [
    "Checkpoints",
    "ElasticDDP",
    "ForgedStrategy",
    "Loader",
    "ProcessGroups",
    "Run",
    "RunStep",
    "Shards",
    "State",
    "Trainer",
    "TrainingArguments",
    "all_reduce_gradients",
    "array_of",
    "init_process_group",
    "join",
    "tensor_of",
]

_MODULES = {
    "Checkpoints": "forged.torch.checkpoints",
    "ElasticDDP": "forged.torch.ddp",
    "Loader": "forged.torch.loader",
    "ForgedStrategy": "forged.torch.frameworks.lightning",
    "ProcessGroups": "forged.torch.group",
    "Run": "forged.torch.run",
    "RunStep": "forged.torch.run_step",
    "Shards": "forged.torch.loader",
    "State": "forged.torch.state",
    "Trainer": "forged.torch.frameworks.trainer",
    "TrainingArguments": "forged.torch.frameworks.trainer",
    "all_reduce_gradients": "forged.torch.ddp",
    "array_of": "forged.torch.tensors",
    "init_process_group": "forged.torch.group",
    "join": "forged.torch.run",
    "tensor_of": "forged.torch.tensors",
}
"""By public name, the module that defines it; imported on demand, so that each user imports what it uses only."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name == "torch":
            error.add_note("forged.torch needs torch: pip install 'forged-ml[torch]'")
        raise
