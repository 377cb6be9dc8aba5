"""`forgectl ckpt verify --job`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import forged.checkpoint
from tests.cli.catalog.scripted_catalogue import Caught, catalogue, record


@pytest.mark.parametrize("name", ["latest", "@400", "ckpt-00000004"])
def test_named_checkpoint_is_verified_where_it_is_stored(tmp_path: Path, capsys: Caught, name: str) -> None:
    forged.checkpoint.save(tmp_path / "step-400", {"w": np.ones(3)})
    meta = record(4, storage_path=f"{tmp_path}/step-400")
    with catalogue(tmp_path, meta, FindRestorePoints={"points": [{"meta": meta}], "excluded": []}) as daemon:
        code, out, err = daemon.run(f"ckpt verify {name} --job run", capsys)
    assert (code, err) == (0, "")
    assert out.startswith("step-400 is valid: ")


def test_checkpoint_that_is_not_here_is_missing(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, record(4, storage_path=f"{tmp_path}/gone/step-400")) as daemon:
        code, out, err = daemon.run("ckpt verify @400 --job run", capsys)
    assert (code, out) == (3, "")
    assert f"{tmp_path}/gone" in err


def test_all_and_a_job_are_refused_together(tmp_path: Path, capsys: Caught) -> None:
    with catalogue(tmp_path, record(4)) as daemon:
        code, _, err = daemon.run("ckpt verify latest --all --job run", capsys)
    assert (code, "--all and --job are both given" in err) == (2, True)
