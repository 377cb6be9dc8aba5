"""The range of a prefix contains exactly the keys that start with it."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from forged.kernel.store.keys import KEY_END, prefix_end
from forged.kernel.store.port import KEY_BYTES_MAX

ENDS_OF_RANGES = "a\x00\x7f\ud7ff\ue000\uffff\U00010000\U0010ffff"
CHARACTERS = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(ENDS_OF_RANGES))
TEXTS = st.text(CHARACTERS, max_size=4)


@given(prefix=TEXTS, key=TEXTS)
def test_a_key_is_in_the_range_exactly_when_it_starts_with_the_prefix(prefix: str, key: str) -> None:
    assert (prefix <= key < prefix_end(prefix)) == key.startswith(prefix)


@given(prefix=TEXTS, rest=TEXTS)
def test_whatever_follows_the_prefix_is_in_the_range(prefix: str, rest: str) -> None:
    assert prefix <= prefix + rest < prefix_end(prefix)


@given(prefix=TEXTS)
@example(prefix="a\ud7ff")
def test_the_end_of_a_range_can_be_encoded(prefix: str) -> None:
    assert prefix.encode() < prefix_end(prefix).encode()


@given(left=TEXTS, right=TEXTS)
def test_the_order_of_text_is_the_order_of_its_bytes(left: str, right: str) -> None:
    assert (left < right) == (left.encode() < right.encode())


def test_the_end_is_behind_the_longest_key_and_can_be_encoded() -> None:
    assert KEY_END.encode() > b"\xf4\x8f\xbf\xbf" * (KEY_BYTES_MAX // 4)
