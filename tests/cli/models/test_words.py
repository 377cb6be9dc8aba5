"""The registry's values in words."""

from __future__ import annotations

from typing import Any

import pytest

from forged.cli.models import words

NOW = 1_800_000_000.0


def test_versions_become_text_wherever_they_are() -> None:
    reply = {
        "metadata": {"version": [1, 2, 3], "input_shape": [1, 2, 3]},
        "serving": [0, 1, 0],
        "latest": None,
        "aliases": {"champion": [1, 0, 0], "to": [2, 0, 0]},
        "versions": [{"version": [1, 0, 0]}],
        "shape": [[1, 2, 3]],
    }
    assert words.as_text(reply) == {
        "metadata": {"version": "1.2.3", "input_shape": [1, 2, 3]},
        "serving": "0.1.0",
        "latest": None,
        "aliases": {"champion": "1.0.0", "to": "2.0.0"},
        "versions": [{"version": "1.0.0"}],
        "shape": [[1, 2, 3]],
    }


def test_list_of_aliases_stays_a_list() -> None:
    assert words.as_text({"aliases": ["a", "b", "c"]}) == {"aliases": ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123456, "0.1235"), (12, "12"), (float("nan"), "-"), (float("inf"), "-"), (None, "-"), (True, "-")],
)
def test_measure_that_was_not_taken_is_a_dash(value: Any, text: str) -> None:
    assert words.number(value) == text
    assert words.milliseconds(value) == (text if text == "-" else f"{text} ms")


def test_evidence_names_verdict_measures_and_samples() -> None:
    result = {"passed": True, "latency_p99_ms": 12.0, "latency_p50_ms": None, "accuracy_score": 0.9, "errors": ["a"]}
    recorded = {"number": 3, "result": result, "samples": 1000, "at": NOW - 7200}
    said = words.evidence(recorded, NOW)
    assert said.startswith("no. 3 passed, ")
    assert said.endswith("(2h00m ago): p99 12 ms, accuracy 0.9, 1 error: a, from 1,000 samples")
    assert words.evidence({}, NOW) == "-"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"kind": "registered", "now": "registered"}, "registered"),
        ({"kind": "imported", "now": "production"}, "imported as production"),
        (
            {"kind": "transitioned", "was": "staging", "now": "canary", "evidence": 3},
            "staging → canary, on validation 3",
        ),
        ({"kind": "transitioned", "was": "a", "now": "b", "waiver": "why"}, "a → b, without evidence: why"),
        ({"kind": "validated", "now": "passed", "evidence": 2}, "validation 2: passed"),
        ({"kind": "alias_moved", "alias": "serving", "was": "1.0.0", "now": "1.1.0"}, "alias serving: 1.0.0 → 1.1.0"),
        ({"kind": "alias_moved", "alias": "serving", "was": "", "now": "1.1.0"}, "alias serving → 1.1.0"),
        ({"kind": "alias_moved", "alias": "old", "was": "1.0.0", "now": ""}, "alias old removed"),
        ({"kind": "rolled_back", "now": "1.0.0"}, "rolled back to 1.0.0"),
        ({"kind": "policy_changed", "was": "canary=off", "now": "canary=act"}, "policy: canary=act"),
        ({"kind": "tagged", "now": "git=abc"}, "tagged: git=abc"),
        ({"kind": "deleted"}, "deleted"),
        ({"kind": "newer"}, "newer"),
        ({}, "-"),
    ],
)
def test_entry_of_the_journal_is_a_sentence(entry: dict[str, Any], said: str) -> None:
    assert words.entry(entry) == said


def test_policy_is_a_sentence() -> None:
    policy = {"requires_validation": True, "evidence_max_age_s": 86_400.0, "max_latency_p99_ms": 20.0,
              "min_accuracy": 0.9, "canary": "off", "rollback_threshold": 1.0}  # fmt: skip
    assert words.policy(policy) == (
        "promotion needs a validation of the last 1d00h with p99 <= 20 ms and accuracy >= 0.9; canaries are not watched"
    )
    assert words.policy(policy | {"requires_validation": False, "canary": "act"}) == (
        "promotion needs no validation; a canary is rolled back from priority 1 on"
    )
    assert words.policy({}) == "-"


def test_shapes_sizes_and_checksums_are_short() -> None:
    assert (words.shape([1, 28, 28]), words.shape([]), words.shape(None)) == ("1×28×28", "-", "-")
    assert (words.size(2_150_000_000), words.size(0)) == ("2.15 GB", "-")
    assert words.checksum("sha256:" + "ab" * 32) == "sha256:abababababab…"
    assert words.checksum("") == "-"
