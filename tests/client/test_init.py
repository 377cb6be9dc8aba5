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


def test_every_public_name_is_there() -> None:
    assert [name for name in client.__all__ if not hasattr(client, name)] == []


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = client.Nothing


def test_the_worker_is_loaded_when_it_is_asked_for() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
