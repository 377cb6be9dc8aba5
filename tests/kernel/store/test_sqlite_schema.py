"""The examination of store files; files that fail it are not changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from forged.errors import ConfigError, ForgedError
from forged.kernel.store.port import Entry, StoreCorrupt, StoreUnavailable, Transaction
from forged.kernel.store.sqlite import SqliteStore
from forged.kernel.store.sqlite_connection import APPLICATION_ID, SqliteConnection
from forged.kernel.store.sqlite_schema import CHECKED_BYTES_MAX
from tests.kernel.store.conftest import OpenSqlite
from tests.kernel.store.intercept import connect_with

PAGE_BYTES = 4096
HEADER_BYTES = 100
TABLE_LEAF = 13
B_TREE_PAGES = {2, 5, 10, TABLE_LEAF}


def sql(path: Path, *statements: str) -> None:
    """Damage the file."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def read(path: Path, statement: str) -> object:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchone()[0]


def load(path: Path) -> bytes:
    return path.read_bytes()


def save(path: Path, found: bytes | bytearray) -> None:
    path.write_bytes(found)


def remove(path: Path) -> None:
    path.unlink()


def make_link(path: Path, target: Path) -> Path:
    path.parent.mkdir()
    path.symlink_to(target)
    return path


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def files(directory: Path) -> Mapping[str, bytes]:
    return {each.name: each.read_bytes() for each in directory.iterdir() if each.is_file()}


async def write_store(path: Path) -> None:
    """A closed store of about forty pages with small and long values and free pages."""
    store = await SqliteStore.open(path)
    random = Random(1)
    for revision in range(1, 11):
        small = {f"small/{random.randrange(300):03}": random.randbytes(200) for _ in range(40)}
        long = {f"long/{revision}": random.randbytes(10_000)}
        deletes = [f"long/{revision - 5}"] if revision > 5 else []
        await store.commit([Transaction(revision, small | long, deletes)])
    await store.close()


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    await write_store(path)
    return path


async def refusal(path: Path, checked_bytes_max: int = CHECKED_BYTES_MAX) -> ForgedError | None:
    """The error of opening the store, after which no file may have changed; None if it opens."""
    before = files(path.parent)
    try:
        store = await SqliteStore.open(path, checked_bytes_max=checked_bytes_max)
    except ForgedError as error:
        assert files(path.parent) == before
        return error
    await store.close()
    return None


async def assert_corrupt(path: Path, what: str = "", checked_bytes_max: int = CHECKED_BYTES_MAX) -> None:
    error = await refusal(path, checked_bytes_max)
    assert isinstance(error, StoreCorrupt), error
    assert error.code == "store_corrupt"
    assert str(path) in error.message
    assert what in error.message
    assert str(path.parent) in error.fix
    assert "restore a backup" in error.fix


def interrupt_close(connection: SqliteConnection, statement: str) -> None:
    """Keep the log file, as after a kill."""
    if statement == "close":
        connection.interrupt()


def without_a_leaf(whole: bytes) -> bytes:
    """The file with one page of small values overwritten with zeros."""
    pages = range(PAGE_BYTES, len(whole), PAGE_BYTES)
    leaf = next(at for at in pages if whole[at] == TABLE_LEAF and b"small/1" in whole[at : at + PAGE_BYTES])
    return whole[:leaf] + bytes(PAGE_BYTES) + whole[leaf + PAGE_BYTES :]


async def content(path: Path) -> tuple[int, str, Sequence[Entry]]:
    store = await SqliteStore.open(path)
    try:
        return store.revision, store.history, await store.list("")
    finally:
        await store.close()


class TestNewStores:
    async def test_new_file_has_application_id_and_version(self, path: Path) -> None:
        assert read(path, "PRAGMA application_id") == APPLICATION_ID
        assert read(path, "PRAGMA user_version") == 1
        assert read(path, "SELECT value FROM meta WHERE name = 'schema_version'") == 1

    async def test_its_history_is_drawn_once_and_kept(self, open_sqlite: OpenSqlite, tmp_path: Path) -> None:
        def draw(size: int) -> bytes:
            return bytes(range(size))

        store = await open_sqlite(tmp_path / "store.db", random_bytes=draw)
        assert store.history == "000102030405060708090a0b0c0d0e0f"
        await store.close()
        assert (await open_sqlite(tmp_path / "store.db")).history == store.history

    async def test_two_new_stores_have_two_histories(self, open_sqlite: OpenSqlite, tmp_path: Path) -> None:
        first, second = [await open_sqlite(tmp_path / name) for name in ("one.db", "two.db")]
        assert first.history != second.history

    async def test_only_its_owner_may_read_it(self, path: Path) -> None:
        assert mode(path) == 0o600

    async def test_a_path_may_have_any_characters(self, open_sqlite: OpenSqlite, tmp_path: Path) -> None:
        odd = tmp_path / "a store?mode=ro#%41;é.db"
        store = await open_sqlite(odd)
        await store.commit([Transaction(1, {"a": b""})])
        assert odd.is_file()

    async def test_a_missing_directory_is_not_made(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as caught:
            await SqliteStore.open(tmp_path / "missing" / "store.db")
        assert caught.value.code == "store_directory_missing"

    async def test_leftover_of_an_interrupted_creation_is_replaced(self, tmp_path: Path) -> None:
        save(tmp_path / "store.db.new", b"half a store")
        assert await refusal(tmp_path / "store.db") is None
        assert set(files(tmp_path)) == {"store.db"}


class TestMigrations:
    @staticmethod
    def add_colour(connection: SqliteConnection) -> None:
        connection.execute("ALTER TABLE kv ADD COLUMN colour TEXT")

    @staticmethod
    def paint(connection: SqliteConnection) -> None:
        connection.execute("UPDATE kv SET colour = 'red'")

    @staticmethod
    def fail(connection: SqliteConnection) -> None:
        connection.execute("UPDATE no_such_table SET colour = 'red'")

    async def test_an_older_store_takes_every_step_and_keeps_its_content(
        self, open_sqlite: OpenSqlite, path: Path
    ) -> None:
        before = await content(path)
        store = await open_sqlite(path, migrations={2: self.add_colour, 3: self.paint})
        assert (store.revision, store.history, await store.list("")) == before
        await store.close()
        assert read(path, "PRAGMA user_version") == 3
        assert read(path, "SELECT value FROM meta WHERE name = 'schema_version'") == 3
        assert read(path, "SELECT count(*) FROM kv WHERE colour IS NOT 'red'") == 0

    async def test_a_store_in_between_takes_only_the_steps_it_lacks(self, open_sqlite: OpenSqlite, path: Path) -> None:
        await (await open_sqlite(path, migrations={2: self.add_colour})).close()
        await (await open_sqlite(path, migrations={2: self.fail, 3: self.paint})).close()
        assert read(path, "PRAGMA user_version") == 3

    async def test_a_new_store_is_of_the_newest_version(self, open_sqlite: OpenSqlite, tmp_path: Path) -> None:
        store = await open_sqlite(tmp_path / "new.db", migrations={2: self.add_colour})
        await store.commit([Transaction(1, {"a": b""})])
        await store.close()
        assert read(tmp_path / "new.db", "PRAGMA user_version") == 2

    async def test_a_step_that_fails_undoes_those_before_it(self, open_sqlite: OpenSqlite, path: Path) -> None:
        before = await content(path)
        with pytest.raises(StoreCorrupt):
            await open_sqlite(path, migrations={2: self.add_colour, 3: self.fail})
        assert await content(path) == before
        assert read(path, "SELECT count(*) FROM pragma_table_info('kv')") == 3

    async def test_a_store_that_is_too_new_is_refused(self, open_sqlite: OpenSqlite, path: Path) -> None:
        await (await open_sqlite(path, migrations={2: self.add_colour})).close()
        error = await refusal(path)
        assert isinstance(error, ConfigError)
        assert error.code == "store_too_new"
        assert str(path) in error.message


class TestDamage:
    async def test_a_file_cut_off_anywhere_is_corrupt(self, path: Path) -> None:
        whole, random = load(path), Random(2)
        starts = range(0, len(whole), PAGE_BYTES)
        assert len(starts) > 30
        cuts = {1, HEADER_BYTES, len(whole) - 1, *starts, *(start + random.randrange(PAGE_BYTES) for start in starts)}
        for cut in sorted(cuts):
            save(path, whole[:cut])
            await assert_corrupt(path)
            await assert_corrupt(path, checked_bytes_max=0)

    async def test_a_flipped_header_bit_is_refused_or_harmless(self, path: Path) -> None:
        whole, before, random = load(path), await content(path), Random(3)
        refused = 0
        for place in range(HEADER_BYTES):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << random.randrange(8)
            save(path, damaged)
            if (error := await refusal(path)) is None:
                assert await content(path) == before, place
            else:
                assert isinstance(error, ConfigError | StoreUnavailable), place
                refused += 1
        assert refused > 30

    async def test_a_flipped_bit_anywhere_raises_nothing_but_our_own_errors(self, path: Path) -> None:
        whole, random = load(path), Random(4)
        refused = 0
        for _ in range(300):
            damaged = bytearray(whole)
            damaged[random.randrange(len(whole))] ^= 1 << random.randrange(8)
            save(path, damaged)
            try:
                await content(path)
            except StoreCorrupt:
                refused += 1
        assert refused > 10

    async def test_a_lost_page_in_the_middle_is_corrupt(self, path: Path) -> None:
        whole = load(path)
        for start in range(0, len(whole), PAGE_BYTES):
            save(path, whole[:start] + bytes(PAGE_BYTES) + whole[start + PAGE_BYTES :])
            if (error := await refusal(path)) is not None:
                assert isinstance(error, StoreCorrupt)
            else:  # overflow pages and free pages have no structure to check
                assert whole[start] not in B_TREE_PAGES

    @pytest.mark.parametrize("found", [b"", b"\n", b"a text, and not a short one\n" * 1000, bytes(PAGE_BYTES * 3)])
    async def test_a_file_of_something_else_is_corrupt(self, tmp_path: Path, found: bytes) -> None:
        path = tmp_path / "store.db"
        save(path, found)
        await assert_corrupt(path)

    async def test_a_directory_is_corrupt(self, tmp_path: Path) -> None:
        (tmp_path / "store.db").mkdir()
        await assert_corrupt(tmp_path / "store.db", "it is not a file")

    async def test_a_database_of_another_application_is_corrupt(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        sql(path, "CREATE TABLE kv (key, value, revision)", "PRAGMA user_version = 1")
        await assert_corrupt(path, "it is no store of forged: its SQLite application id is 0x0")

    @pytest.mark.parametrize(
        ("statement", "what"),
        [
            ("DROP TABLE kv", "no such table: kv"),
            ("DROP TABLE meta", "no such table: meta"),
            ("ALTER TABLE kv RENAME COLUMN value TO worth", "no such column: value"),
            ("DELETE FROM meta WHERE name = 'revision'", "its revision is missing"),
            ("UPDATE meta SET value = 'x' WHERE name = 'revision'", "its revision is missing"),
            ("DELETE FROM meta WHERE name = 'history'", "its history is missing"),
            ("DELETE FROM meta WHERE name = 'schema_version'", "disagree"),
            ("PRAGMA user_version = 0", "its schema version is 0"),
        ],
    )
    async def test_a_store_that_lacks_something_is_corrupt(self, path: Path, statement: str, what: str) -> None:
        sql(path, statement)
        await assert_corrupt(path, what)

    @pytest.mark.parametrize("suffix", ["-wal", "-journal"])
    async def test_a_log_without_its_database_is_corrupt(self, path: Path, suffix: str) -> None:
        save(path.with_name(path.name + suffix), b"a log")
        remove(path)
        await assert_corrupt(path, f"it is missing, while store.db{suffix} is there")

    async def test_a_damaged_database_is_left_alone_with_its_log(self, open_sqlite: OpenSqlite, path: Path) -> None:
        whole = load(path)
        store = await open_sqlite(path, connect=connect_with(interrupt_close))
        await store.commit([Transaction(11, {"late": bytes(20_000)})])
        await store.close()
        assert len(files(path.parent)["store.db-wal"]) > 20_000
        save(path, without_a_leaf(whole))
        await assert_corrupt(path)
        save(path, whole)
        assert Entry("late", bytes(20_000), 11) in (await content(path))[2]


class TestLinks:
    async def test_a_store_behind_a_link_is_found_with_its_log(self, open_sqlite: OpenSqlite, path: Path) -> None:
        link = make_link(path.parent / "elsewhere" / "link.db", path)
        store = await open_sqlite(link, connect=connect_with(interrupt_close))
        await store.commit([Transaction(11, {"late": bytes(200_000)})])
        await store.close()
        assert (await content(link))[0] == (await content(path))[0] == 11


class TestLargeStores:
    async def test_damage_in_a_store_above_the_limit_shows_when_it_is_read(
        self, open_sqlite: OpenSqlite, path: Path
    ) -> None:
        whole = load(path)
        save(path, without_a_leaf(whole))
        await assert_corrupt(path)
        store = await open_sqlite(path, checked_bytes_max=len(whole) - 1)
        with pytest.raises(StoreCorrupt):
            await store.list("")

    async def test_a_store_above_the_limit_opens(self, open_sqlite: OpenSqlite, path: Path) -> None:
        store = await open_sqlite(path, checked_bytes_max=0)
        assert isinstance(await store.get("long/10"), Entry)
