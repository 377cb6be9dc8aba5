"""The contract of all stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forged.errors import RequestRefused, Unavailable
from forged.kernel.store.memory import MemoryStore
from forged.kernel.store.port import (
    ABSENT,
    KEY_BYTES_MAX,
    OPERATIONS_MAX,
    PAGE_ENTRIES_MAX,
    REVISION_MAX,
    VALUE_BYTES_MAX,
    Change,
    Compacted,
    Conflict,
    Entry,
    Store,
    StoreFenced,
    Transaction,
)
from forged.kernel.store.sqlite import SqliteStore

HIGHEST = "\U0010ffff"
OpenStore: TypeAlias = Callable[..., Awaitable[Store]]


@pytest.fixture(params=["memory", "sqlite"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenStore]:
    opened: list[Store] = []

    async def open_one(changes_max: int = 1000, changes_bytes_max: int = 1 << 20) -> Store:
        store: Store
        if request.param == "memory":
            store = MemoryStore("a history", changes_max=changes_max, changes_bytes_max=changes_bytes_max)
        else:
            store = await SqliteStore.open(
                tmp_path / "store.db", changes_max=changes_max, changes_bytes_max=changes_bytes_max
            )
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        await store.close()


@pytest.fixture
async def store(open_store: OpenStore) -> Store:
    return await open_store()


async def keys(store: Store, prefix: str, after: str = "", limit: int = PAGE_ENTRIES_MAX) -> Sequence[str]:
    return [entry.key for entry in await store.list(prefix, after=after, limit=limit)]


async def put_all(store: Store, names: Sequence[str]) -> None:
    await store.commit([Transaction(store.revision + 1, dict.fromkeys(names, b""))])


async def take(watch: AsyncIterator[Change], count: int) -> Sequence[Change]:
    return [await anext(watch) for _ in range(count)]


class TestRevisions:
    async def test_a_new_store_is_empty_and_at_revision_0(self, store: Store) -> None:
        assert store.revision == 0
        assert await store.list("") == []

    async def test_an_entry_carries_the_revision_that_wrote_it_last(self, store: Store) -> None:
        await store.commit([Transaction(1, {"a": b"1", "b": b"1"}), Transaction(2, {"a": b"2"})])
        assert await store.get("a") == Entry("a", b"2", 2)
        assert await store.get("b") == Entry("b", b"1", 1)

    async def test_revisions_may_have_gaps(self, store: Store) -> None:
        await store.commit([Transaction(10, {"a": b""}), Transaction(20, {"b": b""})])
        assert store.revision == 20

    async def test_the_highest_revision_is_kept(self, store: Store) -> None:
        await store.commit([Transaction(REVISION_MAX, {"a": b""})])
        assert await store.get("a") == Entry("a", b"", REVISION_MAX)

    async def test_a_transaction_without_writes_still_advances_the_revision(self, store: Store) -> None:
        assert await store.commit([Transaction(7)]) == [None]
        assert store.revision == 7

    async def test_an_empty_batch_changes_nothing(self, store: Store) -> None:
        assert await store.commit([]) == []
        assert store.revision == 0

    async def test_a_deleted_key_is_absent(self, store: Store) -> None:
        await store.commit([Transaction(1, {"a": b"", "b": b""}), Transaction(2, deletes=["a"])])
        assert await store.get("a") is None
        assert await keys(store, "") == ["b"]

    async def test_deleting_an_absent_key_is_no_error(self, store: Store) -> None:
        assert await store.commit([Transaction(1, deletes=["never"])]) == [None]

    async def test_the_last_write_to_a_key_in_a_batch_wins(self, store: Store) -> None:
        await store.commit(
            [
                Transaction(1, {"a": b"1", "b": b"1"}),
                Transaction(2, deletes=["a", "b"]),
                Transaction(3, {"a": b"3"}),
            ]
        )
        assert await store.list("") == [Entry("a", b"3", 3)]

    async def test_a_key_both_put_and_deleted_is_deleted(self, store: Store) -> None:
        await store.commit([Transaction(1, {"a": b""}, deletes=["a"])])
        assert await store.get("a") is None


class TestExpectations:
    async def test_a_key_at_its_expected_revision_lets_the_transaction_apply(self, store: Store) -> None:
        await store.commit([Transaction(1, {"a": b"1"})])
        assert await store.commit([Transaction(2, {"a": b"2"}, expect={"a": 1})]) == [None]

    async def test_a_key_at_another_revision_leaves_the_transaction_out(self, store: Store) -> None:
        await store.commit([Transaction(1, {"a": b"1"})])
        await store.commit([Transaction(2, {"a": b"2"})])
        assert await store.commit([Transaction(3, {"a": b"3", "b": b""}, expect={"a": 1})]) == [Conflict("a", 1, 2)]
        assert await store.list("") == [Entry("a", b"2", 2)]
        assert store.revision == 2

    async def test_absence_can_be_expected(self, store: Store) -> None:
        assert await store.commit([Transaction(1, {"a": b"1"}, expect={"a": ABSENT})]) == [None]
        assert await store.commit([Transaction(2, {"a": b"2"}, expect={"a": ABSENT})]) == [Conflict("a", ABSENT, 1)]

    async def test_an_expected_key_that_is_absent_is_a_conflict(self, store: Store) -> None:
        assert await store.commit([Transaction(1, {"a": b""}, expect={"b": 5})]) == [Conflict("b", 5, ABSENT)]

    async def test_a_conflict_leaves_out_that_transaction_alone(self, store: Store) -> None:
        batch = [
            Transaction(1, {"a": b"1"}),
            Transaction(2, {"b": b"2"}, expect={"a": ABSENT}),
            Transaction(3, {"c": b"3"}),
        ]
        assert await store.commit(batch) == [None, Conflict("a", ABSENT, 1), None]
        assert await keys(store, "") == ["a", "c"]

    async def test_a_transaction_sees_the_puts_and_deletes_of_earlier_ones_in_the_batch(self, store: Store) -> None:
        batch = [
            Transaction(1, {"a": b"1"}, expect={"a": ABSENT}),
            Transaction(2, deletes=["a"], expect={"a": 1}),
            Transaction(3, {"a": b"3"}, expect={"a": ABSENT}),
        ]
        assert await store.commit(batch) == [None, None, None]

    async def test_transaction_does_not_see_a_refused_transaction(self, store: Store) -> None:
        batch = [
            Transaction(1, {"a": b"1"}, expect={"b": 9}),
            Transaction(2, {"a": b"2"}, expect={"a": ABSENT}),
        ]
        assert await store.commit(batch) == [Conflict("b", 9, ABSENT), None]


class TestFencing:
    @pytest.mark.parametrize("revision", [-1, 0, 4, 5])
    async def test_a_revision_that_is_not_ahead_is_fenced(self, store: Store, revision: int) -> None:
        await store.commit([Transaction(5, {"a": b"5"})])
        with pytest.raises(StoreFenced) as caught:
            await store.commit([Transaction(revision, {"a": b"x"})])
        assert caught.value.code == "store_fenced"

    async def test_a_fenced_transaction_keeps_the_whole_batch_out(self, store: Store) -> None:
        with pytest.raises(StoreFenced):
            await store.commit([Transaction(1, {"a": b""}), Transaction(1, {"b": b""})])
        assert (await store.list(""), store.revision) == ([], 0)

    async def test_the_revision_of_a_conflict_may_be_used_again(self, store: Store) -> None:
        batch = [Transaction(1, {"a": b""}, expect={"a": 9}), Transaction(1, {"b": b""})]
        assert await store.commit(batch) == [Conflict("a", 9, ABSENT), None]


class TestLists:
    async def test_keys_come_in_the_order_of_their_code_points(self, store: Store) -> None:
        names = ["\x00", " ", "/", "0", "Z", "a", "a\x00", "a/", "aa", "ä", "€", "\ud7ff", "\ue000", "😀", HIGHEST]
        await put_all(store, list(reversed(names)))
        assert await keys(store, "") == names

    @pytest.mark.parametrize(
        ("prefix", "found"),
        [
            ("", ["a", "a/1", "a/2", "a0", "b"]),
            ("a", ["a", "a/1", "a/2", "a0"]),
            ("a/", ["a/1", "a/2"]),
            ("a/1", ["a/1"]),
            ("a/11", []),
            ("c", []),
        ],
    )
    async def test_a_prefix_selects_the_keys_that_start_with_it(
        self, store: Store, prefix: str, found: Sequence[str]
    ) -> None:
        await put_all(store, ["a", "a/1", "a/2", "a0", "b"])
        assert await keys(store, prefix) == found

    @pytest.mark.parametrize(
        "prefix", ["k" + HIGHEST, HIGHEST, HIGHEST * 2, "k\ud7ff", "k\x00", "k\x7f", "k\uffff", "k%", "k_", "k*"]
    )
    async def test_a_prefix_may_end_in_any_character(self, store: Store, prefix: str) -> None:
        inside = [prefix, prefix + "\x00", prefix + HIGHEST * 3]
        await put_all(store, [*inside, "a", "k", "l", "\ue000", prefix[:-1] + "!!"])
        assert await keys(store, prefix) == inside

    async def test_the_longest_key_of_the_highest_character_is_found(self, store: Store) -> None:
        longest = HIGHEST * (KEY_BYTES_MAX // 4)
        await put_all(store, [longest])
        assert await keys(store, "") == await keys(store, longest) == [longest]

    async def test_pages_chain_by_their_last_keys(self, store: Store) -> None:
        names = [f"p/{number:03}" for number in range(25)]
        await put_all(store, ["o", *names, "q"])
        pages, after = [], ""
        while page := await keys(store, "p/", after, 10):
            pages.append(page)
            after = page[-1]
        assert [len(page) for page in pages] == [10, 10, 5]
        assert [key for page in pages for key in page] == names

    @pytest.mark.parametrize(
        ("after", "found"),
        [("", ["p/1", "p/3"]), ("a", ["p/1", "p/3"]), ("p/1", ["p/3"]), ("p/2", ["p/3"]), ("p/3", []), ("z", [])],
    )
    async def test_after_may_be_any_key_whether_or_not_it_exists(
        self, store: Store, after: str, found: Sequence[str]
    ) -> None:
        await put_all(store, ["a", "p/1", "p/3", "z"])
        assert await keys(store, "p/", after) == found


class TestLimits:
    @pytest.mark.parametrize(
        ("transaction", "code"),
        [
            (Transaction(1, deletes=["a"] * (OPERATIONS_MAX + 1)), "transaction_too_large"),
            (Transaction(1, {"a": bytes(VALUE_BYTES_MAX + 1)}), "value_too_large"),
            (Transaction(1, {"": b""}), "key_invalid"),
            (Transaction(1, {"a" * (KEY_BYTES_MAX + 1): b""}), "key_invalid"),
            (Transaction(1, {"ä" * (KEY_BYTES_MAX // 2 + 1): b""}), "key_invalid"),
            (Transaction(1, {"\ud800": b""}), "key_invalid"),
            (Transaction(1, deletes=["\ud800"]), "key_invalid"),
            (Transaction(1, expect={"": 1}), "key_invalid"),
            (Transaction(REVISION_MAX + 1), "revision_invalid"),
        ],
    )
    async def test_a_transaction_over_a_limit_keeps_the_whole_batch_out(
        self, store: Store, transaction: Transaction, code: str
    ) -> None:
        with pytest.raises(RequestRefused) as caught:
            await store.commit([Transaction(1, {"before": b""}), transaction])
        assert caught.value.code == code
        assert await store.list("") == []

    async def test_the_largest_transaction_applies(self, store: Store) -> None:
        puts = {f"{number:0{KEY_BYTES_MAX}}": b"" for number in range(OPERATIONS_MAX - 1)}
        await store.commit([Transaction(1, puts | {"big": bytes(VALUE_BYTES_MAX)})])
        assert await store.get("big") == Entry("big", bytes(VALUE_BYTES_MAX), 1)
        assert len(await store.list("0")) == OPERATIONS_MAX - 1

    @pytest.mark.parametrize("limit", [-1, 0, PAGE_ENTRIES_MAX + 1])
    async def test_a_page_outside_the_limits_is_refused(self, store: Store, limit: int) -> None:
        with pytest.raises(RequestRefused):
            await store.list("", limit=limit)

    @pytest.mark.parametrize("key", ["", "\udfff", "a" * (KEY_BYTES_MAX + 1)])
    async def test_invalid_key_is_not_readable(self, store: Store, key: str) -> None:
        with pytest.raises(RequestRefused):
            await store.get(key)

    async def test_invalid_prefix_is_refused(self, store: Store) -> None:
        with pytest.raises(RequestRefused):
            await store.list("\ud800")
        with pytest.raises(RequestRefused):
            store.watch("\ud800", 0)


class TestWatches:
    async def test_a_watch_yields_the_changes_after_a_revision_in_order(self, store: Store) -> None:
        await store.commit([Transaction(1, {"a": b"1"})])
        await store.commit([Transaction(2, {"b": b"2"}), Transaction(3, {"a": b"3"}, deletes=["b"])])
        assert await take(store.watch("", 1), 3) == [Change("b", b"2", 2), Change("a", b"3", 3), Change("b", None, 3)]

    async def test_watch_yields_only_keys_with_its_prefix(self, store: Store) -> None:
        await store.commit([Transaction(1, {"a/1": b"", "b/1": b""}, deletes=["a/2", "b/2"])])
        assert await take(store.watch("b/", 0), 2) == [Change("b/1", b"", 1), Change("b/2", None, 1)]

    async def test_a_key_put_and_deleted_by_one_transaction_is_one_change(self, store: Store) -> None:
        watch = store.watch("", 0)
        await store.commit([Transaction(1, {"a": b""}, deletes=["a"]), Transaction(2, {"end": b""})])
        assert await take(watch, 2) == [Change("a", None, 1), Change("end", b"", 2)]

    async def test_a_conflict_is_no_change(self, store: Store) -> None:
        watch = store.watch("", 0)
        await store.commit([Transaction(1, {"a": b""}, expect={"a": 9}), Transaction(2, {"b": b""})])
        assert await take(watch, 1) == [Change("b", b"", 2)]

    async def test_a_waiting_watch_wakes_for_a_commit(self, store: Store) -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(take(store.watch("", 0), 2)) for _ in range(3)]
            await asyncio.sleep(0)
            await store.commit([Transaction(1, {"a": b""})])
            await store.commit([Transaction(2, {"b": b""})])
        assert [task.result() for task in waiting] == [[Change("a", b"", 1), Change("b", b"", 2)]] * 3

    async def test_watch_skips_revisions_up_to_its_start(self, store: Store) -> None:
        watch = store.watch("", 2)
        for revision in (1, 2, 3):
            await store.commit([Transaction(revision, {"a": b""})])
        assert await take(watch, 1) == [Change("a", b"", 3)]

    async def test_watch_yields_a_change_before_its_commit_returns(self, store: Store) -> None:
        watch = store.watch("", 0)
        await store.commit([Transaction(1, {"a": b""})])
        told = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        assert told.done()
        assert told.result() == Change("a", b"", 1)

    async def test_a_cancelled_wait_loses_nothing(self, store: Store) -> None:
        watch = store.watch("", 0)
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await store.commit([Transaction(1, {"a": b""})])
        assert await take(watch, 1) == [Change("a", b"", 1)]

    async def test_watch_of_dropped_revisions_is_refused_and_must_list(self, open_store: OpenStore) -> None:
        store = await open_store(changes_max=4)
        for revision in (1, 2, 3):
            await store.commit([Transaction(revision, {"a": b""})])
        with pytest.raises(Compacted) as caught:
            await anext(store.watch("", 0))
        assert caught.value.fix == "list, then watch from the store's revision"

    async def test_a_watch_of_the_last_that_is_kept_goes_on(self, open_store: OpenStore) -> None:
        store = await open_store(changes_max=4)
        for revision in (10, 20, 30):
            await store.commit([Transaction(revision, {"a": b""})])
        assert [change.revision for change in await take(store.watch("", 10), 2)] == [20, 30]

    async def test_watch_that_falls_behind_raises_compacted(self, open_store: OpenStore) -> None:
        store = await open_store(changes_max=10)
        watch = store.watch("", 0)
        await store.commit([Transaction(1, {"a": b"", "b": b""})])
        assert await anext(watch) == Change("a", b"", 1)
        for revision in range(2, 12):
            await store.commit([Transaction(revision, {"a": b""})])
        assert await anext(watch) == Change("b", b"", 1)
        for _ in range(2):
            with pytest.raises(Compacted):
                await anext(watch)

    async def test_the_bytes_that_are_kept_are_bounded_too(self, open_store: OpenStore) -> None:
        store = await open_store(changes_bytes_max=1000)
        await store.commit([Transaction(1, {"a": bytes(600)}), Transaction(2, {"a": bytes(600)})])
        with pytest.raises(Compacted):
            await anext(store.watch("", 0))
        assert (await anext(store.watch("", 1))).revision == 2

    async def test_watch_of_a_transaction_over_the_bound_raises_compacted(self, open_store: OpenStore) -> None:
        store = await open_store(changes_bytes_max=1000)
        watch = store.watch("", 0)
        await store.commit([Transaction(1, {"a": bytes(2000)})])
        with pytest.raises(Compacted):
            await anext(watch)

    async def test_closing_ends_a_watch_after_its_last_change(self, store: Store) -> None:
        watch = store.watch("", 0)
        await store.commit([Transaction(1, {"a": b""})])
        await store.close()
        assert [change async for change in watch] == [Change("a", b"", 1)]

    async def test_closing_ends_a_waiting_watch(self, store: Store) -> None:
        async def drain() -> Sequence[Change]:
            return [change async for change in store.watch("", 0)]

        draining = asyncio.ensure_future(drain())
        await asyncio.sleep(0)
        await store.close()
        assert await draining == []


class TestClosing:
    async def test_closing_twice_is_closing(self, store: Store) -> None:
        await store.close()
        await store.close()

    async def test_closing_from_two_places_at_once_is_closing(self, store: Store) -> None:
        await asyncio.gather(store.close(), store.close())

    async def test_a_closed_store_is_unavailable(self, store: Store) -> None:
        await store.close()
        for operation in (store.get("a"), store.list(""), store.commit([Transaction(1, {"a": b""})])):
            with pytest.raises(Unavailable) as caught:
                await operation
            assert caught.value.code == "store_closed"
        with pytest.raises(Unavailable):
            store.watch("", 0)

    async def test_closed_store_still_has_its_revision_and_history(self, store: Store) -> None:
        await store.commit([Transaction(3, {"a": b""})])
        history = store.history
        await store.close()
        assert (store.revision, store.history) == (3, history)


KEYS = st.sampled_from(["a", "b", "a/1", "a/2", HIGHEST, "\ud7ff", "ä"])
TRANSACTIONS = st.builds(
    Transaction,
    revision=st.integers(0, 12),
    puts=st.dictionaries(KEYS, st.binary(max_size=3), max_size=4),
    deletes=st.lists(KEYS, max_size=3),
    expect=st.dictionaries(KEYS, st.integers(0, 12), max_size=2),
)


async def outcomes(store: Store, batches: Sequence[Sequence[Transaction]]) -> Sequence[object]:
    """Everything observable of a store while it commits the batches."""
    seen: list[object] = []
    watch = store.watch("", 0)
    for batch in batches:
        try:
            seen.append(await store.commit(batch))
        except StoreFenced as fenced:
            seen.append(fenced.message)
        seen.append(store.revision)
        seen.extend([await store.list(prefix, after="a", limit=3) for prefix in ("", "a", "a/", HIGHEST)])
        seen.append(await store.list(""))
    await store.close()
    seen.append([change async for change in watch])
    return seen


@given(batches=st.lists(st.lists(TRANSACTIONS, max_size=4), max_size=6))
@settings(max_examples=150, deadline=None)
def test_all_stores_show_the_same_for_the_same_batches(
    batches: Sequence[Sequence[Transaction]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def both() -> None:
        durable = await SqliteStore.open(tmp_path_factory.mktemp("twin") / "store.db")
        assert await outcomes(durable, batches) == await outcomes(MemoryStore("a history"), batches)

    asyncio.run(both())
