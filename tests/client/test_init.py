"""The public names of `forged.client`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forged import client

LIGHT = """
import sys
import forged.client
assert not {"numpy", "forged.worker"} & set(sys.modules), "to ask a daemon takes neither"
from forged.client import ElasticWorker
assert ElasticWorker.__module__ == "forged.worker.worker"
"""


def test_every_public_name_is_importable() -> None:
    assert [name for name in client.__all__ if not hasattr(client, name)] == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = client.Nothing


def test_worker_module_is_imported_on_first_use() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
