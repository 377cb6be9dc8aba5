from __future__ import annotations

from forged.elastic.failure_detector.peer_reports import PeerReports


def said(*pairs: str, generation: int = 1) -> PeerReports:
    reports = PeerReports()
    for pair in pairs:
        reports.add(pair[0], pair[1], generation)
    return reports


BY_ALPHABET = {worker: ord(worker) for worker in "abcd"}


def test_at_first_there_are_no_peer_reports() -> None:
    reports = PeerReports()
    assert reports.worlds == 0
    assert reports.reporter_of("a", 0) == ""
    assert reports.worst(BY_ALPHABET) is None


def test_a_report_is_about_one_worker_in_one_world() -> None:
    reports = said("ba", generation=4)
    assert reports.reporter_of("a", 4) == "b"
    assert reports.reporter_of("b", 4) == ""
    assert reports.reporter_of("a", 5) == ""


def test_worlds_are_counted_once_however_many_report() -> None:
    reports = said("ba", "ca", "da")
    assert reports.worlds == 1
    reports.add("b", "a", 2)
    assert reports.worlds == 2


def test_worker_with_reports_by_most_peers_is_the_worst() -> None:
    assert said("ba", "ca", "da").worst(BY_ALPHABET) == "a"
    assert said("ab", "ac", "ad").worst(BY_ALPHABET) == "a"


def test_of_two_that_report_each_other_the_higher_rank_is_worse() -> None:
    assert said("ab", "ba").worst(BY_ALPHABET) == "b"
    assert said("ab").worst(BY_ALPHABET) == "b"


def test_repeated_report_makes_no_worker_worse() -> None:
    reports = said("ba", "ab", "cb")
    reports.add("a", "b", 2)
    reports.add("b", "a", 3)
    assert reports.worst(BY_ALPHABET) == "b"


def test_reports_by_and_about_a_gone_worker_are_dropped() -> None:
    reports = said("ba", "cb", "cd")
    reports.forget("b")
    assert reports.reporter_of("a", 1) == ""
    assert reports.reporter_of("b", 1) == ""
    assert reports.reporter_of("d", 1) == "c"


def test_a_world_that_broke_over_the_end_of_a_worker_does_not_count() -> None:
    reports = said("ba", "ca")
    reports.add("b", "d", 2)
    reports.add("b", "c", 3)
    reports.add("c", "b", 3)
    reports.forget("a")
    reports.forget("d")
    assert reports.worlds == 1
    assert reports.reporter_of("c", 3) == "b"


def test_when_all_is_well_everything_is_forgotten() -> None:
    reports = said("ba")
    reports.clear()
    reports.clear()
    assert (reports.worlds, reports.reporter_of("a", 1)) == (0, "")


def test_withdrawn_report_does_not_count() -> None:
    reports = said("ab", "ba")
    reports.withdraw("a", "b")
    reports.withdraw("a", "c")
    assert (reports.reporter_of("b", 1), reports.reporter_of("a", 1)) == ("", "b")
    assert reports.between("a", "b")


def test_worst_of_some_counts_reports_of_all_peers() -> None:
    reports = said("ab", "cb", "cd")
    assert reports.worst({"a": 0, "b": 1}) == "b"
    assert reports.worst({"a": 0}) == "a"
    assert reports.worst({"x": 0}) is None
    assert not reports.between("a", "c")


def test_reporter_without_a_peer_is_the_worst_if_no_peer_was_named() -> None:
    reports = said("bb")
    reports.add("b", "b", 2)
    assert (reports.worlds, reports.worst(BY_ALPHABET)) == (2, "b")
    assert reports.reporter_of("b", 1) == "", "no other worker has said so"


def test_reports_without_a_peer_are_explained_by_a_failure_in_that_world() -> None:
    reports = said("bb", "ba")
    reports.add("b", "b", 2)
    reports.explain(2)
    assert reports.worlds == 1
    reports.explain(1)
    assert reports.between("b", "a")
    assert not reports.between("b", "b")
