from __future__ import annotations

import base64
import hashlib
import hmac
import math
from collections.abc import Callable, Collection

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from forged.auth.model import Principal, Role, Token
from forged.auth.tokens import (
    FORGOTTEN_MAX,
    JOB_CHARS_MAX,
    JOBS_PER_TOKEN_MAX,
    NAME_CHARS_MAX,
    SECRET_BYTES_MAX,
    TEXT_CHARS_MAX,
    TOKEN_ID_CHARS,
    TokenRegistry,
)
from forged.errors import ForgedError, RequestRefused, Unavailable

NOW = 1000.0
SECRETS = st.binary(min_size=32, max_size=SECRET_BYTES_MAX)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True)
JOBS = st.none() | st.lists(st.text(min_size=1, max_size=JOB_CHARS_MAX), min_size=1, max_size=5)


def secret(number: int) -> bytes:
    return number.to_bytes(32, "big")


def issue(
    book: TokenRegistry,
    number: int = 1,
    *,
    name: str = "ci",
    jobs: Collection[str] | None = None,
    expires_at: float | None = None,
    now: float = NOW,
) -> tuple[Token, str]:
    return book.issue(name, Role.WORKER, jobs, expires_at, now, secret(number))


def everything(book: TokenRegistry) -> tuple[Token, ...]:
    return tuple(book.after(""))


def refusal(book: TokenRegistry, text: str, now: float = NOW) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        book.authenticate(text, now)
    return caught.value


def invalid(name: str = "ci", jobs: Collection[str] | None = None, expires_at: float | None = None) -> str:
    book = TokenRegistry()
    with pytest.raises(RequestRefused) as caught:
        issue(book, name=name, jobs=jobs, expires_at=expires_at)
    assert caught.value.code == "token_invalid"
    assert everything(book) == ()
    return caught.value.message


@given(name=NAMES, role=st.sampled_from(Role), jobs=JOBS, entropy=SECRETS)
def test_issued_text_authenticates_as_the_issued_token(
    name: str, role: Role, jobs: list[str] | None, entropy: bytes
) -> None:
    book = TokenRegistry()
    _, text = book.issue(name, role, jobs, None, NOW, entropy)
    assert book.authenticate(text, NOW) == Principal(name, role, None if jobs is None else frozenset(jobs))


@given(entropies=st.lists(SECRETS, min_size=1, max_size=5, unique=True))
def test_tokens_loaded_from_the_store_authenticate_the_same_texts(entropies: list[bytes]) -> None:
    book = TokenRegistry()
    texts = [book.issue(f"n{i}", Role.VIEWER, None, None, NOW, entropy)[1] for i, entropy in enumerate(entropies)]
    stored = [msgspec.msgpack.encode(token) for token in everything(book)]
    again = TokenRegistry()
    again.load(msgspec.msgpack.decode(entry, type=Token) for entry in stored)
    assert everything(again) == everything(book)
    assert [again.authenticate(text, NOW).name for text in texts] == [f"n{i}" for i in range(len(texts))]


@given(entropy=SECRETS)
def test_issued_text_is_ascii_bounded_and_in_the_documented_form(entropy: bytes) -> None:
    token, text = TokenRegistry().issue("ci", Role.VIEWER, None, None, NOW, entropy)
    assert text.isascii()
    assert len(text) <= TEXT_CHARS_MAX
    forged, token_id, spelled = text.split("_", 2)
    assert (forged, token_id) == ("forged", token.token_id)
    assert base64.urlsafe_b64decode(spelled + "=" * (-len(spelled) % 4)) == entropy


@given(entropy=SECRETS)
def test_stored_token_contains_neither_secret_nor_text(entropy: bytes) -> None:
    book = TokenRegistry()
    token, text = book.issue("ci", Role.VIEWER, None, None, NOW, entropy)
    kept = repr(vars(book)).encode() + msgspec.msgpack.encode(token)
    spelled = text.split("_", 2)[2]
    assert entropy not in kept
    assert repr(entropy)[2:-1].encode() not in kept
    assert spelled.encode() not in kept
    assert entropy.hex().encode() not in kept


@given(entropy=SECRETS, position=st.integers(0), bit=st.integers(0, 7))
def test_a_text_with_a_flipped_bit_is_unknown(entropy: bytes, position: int, bit: int) -> None:
    book = TokenRegistry()
    _, text = book.issue("ci", Role.VIEWER, None, None, NOW, entropy)
    at = position % len(text)
    flipped = text[:at] + chr(ord(text[at]) ^ 1 << bit) + text[at + 1 :]
    assert refusal(book, flipped).code == "token_unknown"


@given(entropy=SECRETS, start=st.integers(0), stop=st.integers(0))
def test_a_part_of_the_text_is_unknown(entropy: bytes, start: int, stop: int) -> None:
    book = TokenRegistry()
    _, text = book.issue("ci", Role.VIEWER, None, None, NOW, entropy)
    part = text[start % len(text) : stop % (len(text) + 1)]
    assume(part != text)
    assert refusal(book, part).code == "token_unknown"


@given(entropy=SECRETS, change=st.sampled_from([str.upper, str.lower, str.swapcase, str.title]))
def test_a_text_in_another_case_is_unknown(entropy: bytes, change: Callable[[str], str]) -> None:
    book = TokenRegistry()
    _, text = book.issue("ci", Role.VIEWER, None, None, NOW, entropy)
    changed = change(text)
    assume(changed != text)
    assert refusal(book, changed).code == "token_unknown"


@given(entropy=SECRETS, addition=st.text(min_size=1, max_size=40), in_front=st.booleans())
@example(entropy=secret(1), addition="=", in_front=False)
@example(entropy=secret(1), addition="\n", in_front=False)
@example(entropy=secret(1), addition=" ", in_front=True)
@example(entropy=secret(1), addition="\0", in_front=False)
def test_a_text_with_something_added_is_unknown(entropy: bytes, addition: str, in_front: bool) -> None:
    book = TokenRegistry()
    _, text = book.issue("ci", Role.VIEWER, None, None, NOW, entropy)
    assert refusal(book, addition + text if in_front else text + addition).code == "token_unknown"


def test_another_spelling_of_the_same_secret_is_unknown() -> None:
    book = TokenRegistry()
    _, text = issue(book)
    sibling = text[:-1] + chr(ord(text[-1]) + 1)
    assert base64.urlsafe_b64decode(sibling.split("_", 2)[2] + "=") == secret(1)
    assert refusal(book, sibling).code == "token_unknown"


def test_another_token_s_id_with_the_same_secret_is_unknown() -> None:
    book = TokenRegistry()
    (first, text), (second, _) = issue(book, 1), issue(book, 2)
    assert refusal(book, text.replace(first.token_id, second.token_id)).code == "token_unknown"


@given(text=st.text(max_size=200))
@example(text="")
@example(text="forged_")
@example(text="\ud800")
@example(text="forged_\u00e4")
def test_no_text_that_was_not_issued_authenticates(text: str) -> None:
    book = TokenRegistry()
    issue(book)
    assert refusal(book, text).code == "token_unknown"


def test_a_non_ascii_look_alike_of_the_text_is_unknown() -> None:
    book = TokenRegistry()
    token, text = issue(book)
    full_width = "".join(chr(ord(character) + 0xFEE0) for character in token.token_id)
    assert refusal(book, text.replace(token.token_id, full_width)).code == "token_unknown"


def test_a_megabyte_is_unknown_also_when_it_starts_with_the_text() -> None:
    book = TokenRegistry()
    _, text = issue(book)
    assert refusal(book, "x" * 2**20).code == "token_unknown"
    assert refusal(book, text + "A" * 2**20).code == "token_unknown"


def test_wrong_id_and_wrong_secret_are_refused_in_the_same_words() -> None:
    book = TokenRegistry()
    token, text = issue(book)
    wrong_id = text.replace(token.token_id, "0" * TOKEN_ID_CHARS)
    wrong_secret = text[:-2] + "AA" if text[-2:] != "AA" else text[:-2] + "BB"
    told = {refusal(book, wrong).args for wrong in (wrong_id, wrong_secret, "", "no token at all")}
    assert len(told) == 1


def test_every_wrong_text_costs_one_comparison_of_two_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    book = TokenRegistry()
    token, text = issue(book)
    compared: list[tuple[int, int]] = []
    genuine = hmac.compare_digest

    def counted(expected: bytes, presented: bytes) -> bool:
        compared.append((len(expected), len(presented)))
        return genuine(expected, presented)

    monkeypatch.setattr("forged.auth.tokens.hmac.compare_digest", counted)
    wrong = [text.replace(token.token_id, "0" * TOKEN_ID_CHARS), text + "A", "", "x" * 2**20]
    for attempt in wrong:
        refusal(book, attempt)
    assert compared == [(32, 32)] * len(wrong)


def test_no_more_than_the_longest_possible_text_is_ever_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    genuine = hashlib.sha256

    def measured(data: bytes) -> object:
        hashed.append(len(data))
        return genuine(data)

    monkeypatch.setattr("forged.auth.tokens.hashlib.sha256", measured)
    refusal(TokenRegistry(), "x" * 2**20)
    refusal(TokenRegistry(), "x" * TEXT_CHARS_MAX)
    assert hashed == [0, TEXT_CHARS_MAX]


def test_a_token_is_accepted_until_it_expires() -> None:
    book = TokenRegistry()
    _, text = issue(book, expires_at=NOW + 10)
    assert book.authenticate(text, NOW + 9.5).name == "ci"
    assert refusal(book, text, NOW + 10).code == "token_expired"


def test_a_revoked_token_is_refused_as_revoked() -> None:
    book = TokenRegistry()
    token, text = issue(book)
    book.revoke(token.token_id, NOW + 1)
    assert refusal(book, text, NOW + 1).code == "token_revoked"


def test_a_revoked_token_stays_refused_when_the_clock_goes_back() -> None:
    book = TokenRegistry()
    token, text = issue(book)
    book.revoke(token.token_id, NOW + 100)
    assert refusal(book, text, NOW).code == "token_revoked"


def test_revoked_and_expired_are_reported_only_for_the_complete_text() -> None:
    book = TokenRegistry()
    revoked, revoked_text = issue(book, 1)
    _, expired_text = issue(book, 2, expires_at=NOW + 1)
    book.revoke(revoked.token_id, NOW)
    assert refusal(book, revoked_text[:-1], NOW + 2).code == "token_unknown"
    assert refusal(book, expired_text[:-1], NOW + 2).code == "token_unknown"


def test_revoking_returns_the_token_with_the_time() -> None:
    book = TokenRegistry()
    token, _ = issue(book)
    assert book.revoke(token.token_id, NOW + 1) == msgspec.structs.replace(token, revoked_at=NOW + 1)


def test_revoking_twice_keeps_the_first_time() -> None:
    book = TokenRegistry()
    token, _ = issue(book)
    first = book.revoke(token.token_id, NOW + 1)
    assert book.revoke(token.token_id, NOW + 2) == first
    assert everything(book) == (first,)


def test_revoking_one_token_leaves_the_others() -> None:
    book = TokenRegistry()
    (first, _), (_, text) = issue(book, 1), issue(book, 2)
    book.revoke(first.token_id, NOW)
    assert book.authenticate(text, NOW).name == "ci"


def test_revoking_an_unknown_token_is_refused_and_does_not_repeat_a_long_id() -> None:
    with pytest.raises(RequestRefused) as caught:
        TokenRegistry().revoke("x" * 2**20, NOW)
    assert caught.value.code == "token_not_found"
    assert len(str(caught.value)) < 200


def test_the_list_is_in_the_order_of_ids_and_has_the_revoked_and_expired() -> None:
    book = TokenRegistry()
    expired, _ = issue(book, 2, expires_at=NOW + 1)
    revoked = book.revoke(issue(book, 1)[0].token_id, NOW + 9)
    first, second = sorted((expired, revoked), key=lambda token: token.token_id)
    assert everything(book) == (first, second)
    assert tuple(book.after(first.token_id)) == (second,)


def test_dead_tokens_over_the_limit_are_deleted_oldest_first() -> None:
    book = TokenRegistry(dead_max=1)
    (revoked, _), (expired, _), (late, _), (live, _) = (
        issue(book, 1),
        issue(book, 2, expires_at=NOW + 1),
        issue(book, 3, expires_at=NOW + 9),
        issue(book, 4),
    )
    book.revoke(revoked.token_id, NOW + 5)
    assert book.forget_dead(NOW + 9) == [expired.token_id, revoked.token_id]
    assert book.forget_dead(NOW + 9) == []
    assert set(everything(book)) == {late, live}


def test_number_of_tokens_deleted_at_once_is_bounded() -> None:
    book = TokenRegistry(dead_max=0)
    for number in range(FORGOTTEN_MAX + 1):
        issue(book, number, expires_at=NOW + 1)
    assert [len(book.forget_dead(NOW + 1)) for _ in range(3)] == [FORGOTTEN_MAX, 1, 0]


def test_loading_replaces_all_tokens() -> None:
    book = TokenRegistry()
    _, text = issue(book)
    book.load(())
    assert everything(book) == ()
    assert refusal(book, text).code == "token_unknown"


def test_one_name_may_have_several_tokens() -> None:
    book = TokenRegistry()
    issue(book, 1, name="ci")
    issue(book, 2, name="ci")
    assert [token.name for token in everything(book)] == ["ci", "ci"]


def test_jobs_are_stored_once_each_and_in_order() -> None:
    assert issue(TokenRegistry(), jobs=["b", "a", "b"])[0].jobs == ("a", "b")


def test_no_more_than_tokens_max_are_live_at_a_time() -> None:
    book = TokenRegistry(tokens_max=2)
    issue(book, 1)
    issue(book, 2)
    with pytest.raises(RequestRefused) as caught:
        issue(book, 3)
    assert caught.value.code == "tokens_full"
    assert "tokens_max is 2" in caught.value.message
    assert len(everything(book)) == 2


def test_a_revoked_or_expired_token_makes_room() -> None:
    book = TokenRegistry(tokens_max=2)
    token, _ = issue(book, 1)
    issue(book, 2, expires_at=NOW + 1)
    book.revoke(token.token_id, NOW)
    issue(book, 3)
    issue(book, 4, now=NOW + 1)


def test_reused_secret_is_refused_and_keeps_the_first_token() -> None:
    book = TokenRegistry()
    _, text = issue(book, 1)
    with pytest.raises(Unavailable) as caught:
        issue(book, 1, name="other")
    assert caught.value.code == "token_id_taken"
    assert book.authenticate(text, NOW).name == "ci"


@pytest.mark.parametrize("size", [0, 16, 31, SECRET_BYTES_MAX + 1])
def test_secret_of_invalid_length_is_an_internal_error(size: int) -> None:
    with pytest.raises(ForgedError) as caught:
        TokenRegistry().issue("ci", Role.WORKER, None, None, NOW, bytes(size))
    assert (caught.value.kind, caught.value.code) == ("internal", "token_secret_size")


@pytest.mark.parametrize(
    "name", ["", " ", "-ci", "ci ", "ci\n", "unix:0", "a/b", "J\u00fcrgen", "x" * (NAME_CHARS_MAX + 1)]
)
def test_a_bad_name_is_refused_by_field(name: str) -> None:
    assert invalid(name=name).startswith("name must be ")


def test_a_name_of_the_full_length_is_accepted() -> None:
    assert issue(TokenRegistry(), name="x" * NAME_CHARS_MAX)[0].name == "x" * NAME_CHARS_MAX


@pytest.mark.parametrize("jobs", [(), tuple(f"j{i}" for i in range(JOBS_PER_TOKEN_MAX + 1))])
def test_a_bad_number_of_jobs_is_refused_by_field(jobs: tuple[str, ...]) -> None:
    message = invalid(jobs=jobs)
    assert message.startswith("jobs must be ")
    assert f"got {len(jobs)}" in message


def test_invalid_job_is_refused_by_its_index() -> None:
    message = invalid(jobs=("a", "", "x" * (JOB_CHARS_MAX + 1)))
    assert "jobs[1] must be " in message
    assert "got ''; jobs[2] must be " in message
    assert "got 'xxx" in message


@pytest.mark.parametrize("expires_at", [NOW, NOW - 1, math.nan, math.inf, -math.inf])
def test_expiry_not_in_the_future_is_refused_by_field(expires_at: float) -> None:
    assert invalid(expires_at=expires_at).startswith("expires_at must be ")


def test_all_bad_fields_are_named_at_once_without_repeating_large_values() -> None:
    message = invalid(name="x" * 2**20, jobs=("y" * 2**20,), expires_at=0.0)
    assert [field in message for field in ("name must be ", "jobs[0] must be ", "expires_at must be ")] == [True] * 3
    assert len(message) < 1000
