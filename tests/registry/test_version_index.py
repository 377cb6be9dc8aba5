from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.registry.book import version_index
from forged.registry.book.version_index import Key, SortedKeys, VersionIndex
from forged.registry.model import ModelVersion

KEYS = st.tuples(st.sampled_from(["a", "a/b", "b"]), st.integers(0, 3).map(lambda number: ModelVersion(0, number, 0)))
PROPERTIES = [("state", "x"), ("tag", "k"), ("tag", "k", "v")]


@given(
    st.lists(st.tuples(KEYS, st.sampled_from(PROPERTIES)), max_size=40),
    st.lists(st.sampled_from(PROPERTIES), min_size=1, max_size=3, unique=True),
    st.one_of(st.none(), KEYS),
    st.integers(1, 5),
)
def test_search_finds_the_versions_with_all_properties_in_order(
    changes: list[tuple[Key, tuple[str, ...]]], wanted: list[tuple[str, ...]], after: Key | None, most: int
) -> None:
    index, having = VersionIndex(), {what: set[Key]() for what in PROPERTIES}
    for key, what in changes:
        if key in having[what]:
            index.remove(key, what)
            having[what].remove(key)
        else:
            index.add(key, what)
            having[what].add(key)
    expected = sorted(key for key in set.intersection(*map(having.__getitem__, wanted)) if after is None or key > after)
    found: list[Key] = []
    position = after
    while True:
        more, position = index.search(wanted, position, most)
        assert len(more) <= most
        found += more
        if position is None:
            break
    assert found == expected


@pytest.mark.parametrize("most", [2, 3, 7])
def test_keys_in_many_blocks_are_those_of_a_sorted_list(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(version_index, "BLOCK_MAX", most)
    chosen, keys, expected = Random(most), SortedKeys(), list[Key]()
    for _ in range(1_000):
        key = chosen.choice("ab"), ModelVersion(0, chosen.randrange(40), 0)
        if key in expected:
            keys.remove(key)
            expected.remove(key)
        else:
            keys.add(key)
            expected.append(key)
        expected.sort()
        assert (list(keys), len(keys)) == (expected, len(expected))
        assert list(keys.after(key)) == [one for one in expected if one > key]
        assert (key in keys) is (key in expected)
        assert all(0 < len(block) <= most for block in keys._blocks)
