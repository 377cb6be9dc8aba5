from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forged.errors import RequestRefused
from forged.ids import CLIENT_ID_BYTES, NAME_LENGTH_MAX, check_name, new_client_id


def test_client_id_has_fixed_length_and_uses_the_given_random_source() -> None:
    first, again, other = (new_client_id(Random(seed).getrandbits) for seed in (1, 1, 2))
    assert len(first) == CLIENT_ID_BYTES
    assert first == again != other


@pytest.mark.parametrize("name", ["a", "7", "resnet-50", "a.b_c-d", "A" * NAME_LENGTH_MAX])
def test_a_name_is_returned_as_it_is(name: str) -> None:
    assert check_name("job", name) == name


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", ".", "..", "a/b", "a b", "a\n", "ä", "a\0", "\ud800", "A" * (NAME_LENGTH_MAX + 1)]
)
def test_invalid_name_is_refused_with_field_and_fix(name: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check_name("job", name)
    assert caught.value.code == "name_invalid"
    assert "job must be" in caught.value.message
    assert str(NAME_LENGTH_MAX) in caught.value.fix
    str(caught.value).encode()


@given(name=st.text(max_size=2 * NAME_LENGTH_MAX))
def test_a_name_can_stand_in_a_key_and_a_path(name: str) -> None:
    try:
        check_name("job", name)
    except RequestRefused:
        return
    assert name.isascii()
    assert not set(name) & set("/\\ \0\n")
    assert name not in (".", "..")


def test_the_refusal_of_a_long_name_is_short() -> None:
    with pytest.raises(RequestRefused) as caught:
        check_name("job", "x" * 1_000_000)
    assert len(caught.value.message) < 2 * NAME_LENGTH_MAX
