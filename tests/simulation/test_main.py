from __future__ import annotations

import pytest

from tests.simulation.__main__ import COVERING_SEEDS, main


def test_seeds_that_keep_all_promises_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:1"]) == 0
    assert capsys.readouterr().out.startswith("1 seeds passed, 0 failed")


def test_check_coverage_fails_and_names_events_that_never_happened(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--seeds", "0:1", "--check-coverage"]) == 1
    said = capsys.readouterr().err
    assert "a job waits too long" in said
    assert f"in 1 seeds (run --seeds 0:{COVERING_SEEDS}, which meet all of them)" in said


def test_a_planted_bug_that_is_not_found_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:1", "--mutant", "keep_nobody_for_the_state"]) == 1
    assert "was not caught by 1 seeds" in capsys.readouterr().err
