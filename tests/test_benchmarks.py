"""Every benchmark runs and prints its figures; the tests do not judge speed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks import torch_training
from benchmarks.__main__ import BENCHMARKS, WITH_TORCH, replaced
from benchmarks.harness import Figure, interleaved

KEYS = {"name", "unit", "ours", "reference", "ratio", "aim", "met"}


needs_torch = pytest.mark.skipif(bool(torch_training.why_not()), reason=torch_training.why_not())


@pytest.mark.parametrize("name", [*BENCHMARKS, *(pytest.param(name, marks=needs_torch) for name in WITH_TORCH)])
def test_a_benchmark_prints_one_object_with_its_figures(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["benchmark"] == name
    assert printed["figures"]
    for figure in printed["figures"]:
        assert figure.keys() == KEYS
        assert figure["ours"] > 0


def test_missing_reference_value_is_not_guessed() -> None:
    record = Figure("rate", "1/s", 10.0, None, 2.0).as_record()
    assert (record["reference"], record["ratio"], record["met"]) == (None, None, None)


def test_a_larger_ratio_is_better_for_rates_and_for_durations() -> None:
    assert Figure("rate", "1/s", 10.0, 5.0).ratio == 2.0
    assert Figure("duration", "s", 5.0, 10.0, higher_is_better=False).ratio == 2.0


def test_subjects_take_turns_and_every_other_round_goes_backwards() -> None:
    order: list[str] = []

    def subject(name: str, value: float) -> float:
        order.append(name)
        return value

    medians = interleaved(2, {"a": lambda: subject("a", 1.0), "b": lambda: subject("b", 2.0)})
    assert order == ["a", "b", "b", "a"]
    assert medians == {"a": 1.0, "b": 2.0}


def test_remeasured_rows_replace_the_old_ones_in_place() -> None:
    page = "# Old\n\n| `bus` | a |\n| `plan` | b |\n| `plan` | c |\n| `gone_host` | d |\n"
    new = replaced(page, "# New\n\n", {"plan": ["| `plan` | e |\n"], "rpc": ["| `rpc` | f |\n"]})
    assert new == "# New\n\n| `bus` | a |\n| `rpc` | f |\n| `plan` | e |\n| `gone_host` | d |\n"
