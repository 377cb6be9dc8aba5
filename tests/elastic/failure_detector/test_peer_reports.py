from __future__ import annotations

from forged.elastic.failure_detector.peer_reports import PeerReports


def said(*pairs: str, generation: int = 1) -> PeerReports:
    complaints = PeerReports()
    for pair in pairs:
        complaints.add(pair[0], pair[1], generation)
    return complaints


BY_ALPHABET = {worker: ord(worker) for worker in "abcd"}


def test_at_first_there_are_no_peer_reports() -> None:
    complaints = PeerReports()
    assert complaints.worlds == 0
    assert complaints.reporter_of("a", 0) == ""
    assert complaints.worst(BY_ALPHABET) is None


def test_a_report_is_about_one_worker_in_one_world() -> None:
    complaints = said("ba", generation=4)
    assert complaints.reporter_of("a", 4) == "b"
    assert complaints.reporter_of("b", 4) == ""
    assert complaints.reporter_of("a", 5) == ""


def test_worlds_are_counted_once_however_many_report() -> None:
    complaints = said("ba", "ca", "da")
    assert complaints.worlds == 1
    complaints.add("b", "a", 2)
    assert complaints.worlds == 2


def test_worker_with_reports_by_most_peers_is_the_worst() -> None:
    assert said("ba", "ca", "da").worst(BY_ALPHABET) == "a"
    assert said("ab", "ac", "ad").worst(BY_ALPHABET) == "a"


def test_of_two_that_report_each_other_the_higher_rank_is_worse() -> None:
    assert said("ab", "ba").worst(BY_ALPHABET) == "b"
    assert said("ab").worst(BY_ALPHABET) == "b"


def test_repeated_report_makes_no_worker_worse() -> None:
    complaints = said("ba", "ab", "cb")
    complaints.add("a", "b", 2)
    complaints.add("b", "a", 3)
    assert complaints.worst(BY_ALPHABET) == "b"


def test_reports_by_and_about_a_gone_worker_are_dropped() -> None:
    complaints = said("ba", "cb", "cd")
    complaints.forget("b")
    assert complaints.reporter_of("a", 1) == ""
    assert complaints.reporter_of("b", 1) == ""
    assert complaints.reporter_of("d", 1) == "c"


def test_a_world_that_broke_over_the_end_of_a_worker_does_not_count() -> None:
    complaints = said("ba", "ca")
    complaints.add("b", "d", 2)
    complaints.add("b", "c", 3)
    complaints.add("c", "b", 3)
    complaints.forget("a")
    complaints.forget("d")
    assert complaints.worlds == 1
    assert complaints.reporter_of("c", 3) == "b"


def test_when_all_is_well_everything_is_forgotten() -> None:
    complaints = said("ba")
    complaints.clear()
    complaints.clear()
    assert (complaints.worlds, complaints.reporter_of("a", 1)) == (0, "")


def test_what_is_withdrawn_was_not_said() -> None:
    complaints = said("ab", "ba")
    complaints.withdraw("a", "b")
    complaints.withdraw("a", "c")
    assert (complaints.reporter_of("b", 1), complaints.reporter_of("a", 1)) == ("", "b")
    assert complaints.between("a", "b")


def test_worst_of_some_counts_reports_of_all_peers() -> None:
    complaints = said("ab", "cb", "cd")
    assert complaints.worst({"a": 0, "b": 1}) == "b"
    assert complaints.worst({"a": 0}) == "a"
    assert complaints.worst({"x": 0}) is None
    assert not complaints.between("a", "c")


def test_reporter_without_a_peer_is_the_worst_if_no_peer_was_named() -> None:
    complaints = said("bb")
    complaints.add("b", "b", 2)
    assert (complaints.worlds, complaints.worst(BY_ALPHABET)) == (2, "b")
    assert complaints.reporter_of("b", 1) == "", "no other worker has said so"


def test_reports_without_a_peer_are_explained_by_a_failure_in_that_world() -> None:
    complaints = said("bb", "ba")
    complaints.add("b", "b", 2)
    complaints.explain(2)
    assert complaints.worlds == 1
    complaints.explain(1)
    assert complaints.between("b", "a")
    assert not complaints.between("b", "b")
