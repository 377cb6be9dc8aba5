from __future__ import annotations

import subprocess
import sys

import pytest

import forged.torch


def test_every_public_name_can_be_imported() -> None:
    """Those for other frameworks are used where the frameworks are installed."""
    modules = forged.torch._MODULES
    assert sorted(modules) == forged.torch.__all__
    names = [name for name, module in modules.items() if not module.startswith("forged.torch.frameworks.")]
    assert [name for name in names if not hasattr(forged.torch, name)] == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = forged.torch.nothing


def test_the_package_alone_imports_no_torch() -> None:
    command = "import sys, forged, forged.checkpoint, forged.worker, forged.torch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
