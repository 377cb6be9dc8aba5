"""PyTorch with forged: tensors, modules and optimizers as training state, and elastic training of torch scripts.

import forged.torch as ft

Needs torch: `pip install 'forged-ml[torch]'`. No other package of forged imports torch or this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forged.torch.state import State
    from forged.torch.tensors import array_of, tensor_of

__all__ = ["State", "array_of", "tensor_of"]

_MODULES = {
    "State": "forged.torch.state",
    "array_of": "forged.torch.tensors",
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
