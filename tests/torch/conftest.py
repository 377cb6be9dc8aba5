"""Tests of `forged.torch`: `make test-torch` runs them in an environment with torch; elsewhere they are left out."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    collect_ignore_glob = ["*"]
else:
    import torch

    # Several test processes share the machine, and each would take all of its cores.
    torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of torch about torch's own code are no errors."""
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:torch\.")
