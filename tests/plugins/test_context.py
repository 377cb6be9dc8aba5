from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from forged.auth.model import Role
from forged.clock import Clock
from forged.errors import ConfigError
from forged.kernel.messages import Fact, Gap, Record, Request, Signal
from forged.log import SILENT
from forged.plugins.context import PluginContext
from tests.kernel_fixture import Added, Echoed
from tests.plugins.plugin_fixture import Guess, Knock, Said


class Nowhere:
    """A host that no plugin has anything to do with yet."""

    history = "a history"

    async def publish(self, plugin: str, facts: Sequence[Fact], job: str, cause: int) -> None:
        raise AssertionError(plugin)

    async def ask(self, plugin: str, request: Request[Any], timeout_s: float | None, cause: int) -> Any:
        raise AssertionError(plugin)


class Stopped:
    def wall(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return 0.0


CLOCK: Clock = Stopped()


@pytest.fixture
def context(tmp_path: Path) -> PluginContext:
    return made(tmp_path)


def made(directory: Path, **config: Any) -> PluginContext:
    return PluginContext("one", config, directory / "one", Nowhere(), CLOCK, SILENT)


def plain(*_: Any) -> None:
    return


async def later(*_: Any) -> Any:
    return None


# Settings.


class Settings(msgspec.Struct):
    url: str
    types: list[str] = []
    times: Annotated[int, msgspec.Meta(ge=1)] = 3


def test_settings_are_a_struct_with_its_defaults(tmp_path: Path) -> None:
    assert made(tmp_path, url="x", types=["A"]).settings(Settings) == Settings("x", ["A"], 3)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({}, ["url"]),
        ({"url": 7}, ["url"]),
        ({"url": "x", "ulr": "y"}, ["ulr"]),
        ({"url": "x", "times": 0}, ["times"]),
        ({"typos": 1, "times": "many", "types": [1]}, ["typos", "times", "types", "url"]),
    ],
)
def test_all_invalid_settings_are_named_by_key(tmp_path: Path, config: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, **config).settings(Settings)
    assert [problem.key for problem in caught.value.problems] == [f"plugins.one.{key}" for key in keys]


def test_the_directory_is_made_when_it_is_asked_for_and_is_the_plugin_s_alone(tmp_path: Path) -> None:
    context = made(tmp_path / "plugins")
    assert not (tmp_path / "plugins").exists()
    assert context.directory() == context.directory() == tmp_path / "plugins" / "one"
    assert context.directory().stat().st_mode & 0o777 == 0o700


# What can be registered.


def test_a_part_is_called_as_its_function_unless_it_is_given_a_name(context: PluginContext) -> None:
    context.on(Added, plain)
    context.on(Added, lambda _: None, name="other")
    context.follow(Added, later)
    assert [one.name for one in context.registration.observing] == ["plain", "other"]
    assert [one.name for one in context.registration.delivering] == ["later"]


@pytest.mark.parametrize(
    "register",
    [
        lambda context: context.on(Added, lambda _: None),
        lambda context: context.on(Added, partial(plain, 1)),
        lambda context: context.every(1, plain, name="no-name"),
        lambda context: context.follow(Added, later, name="größe"),
        lambda context: context.follow(Added, later, name="x" * 65),
        lambda context: context.on_signal(Knock, plain, name="1st"),
    ],
)
def test_part_with_an_invalid_name_is_an_error(
    context: PluginContext, register: Callable[[PluginContext], object]
) -> None:
    with pytest.raises(ValueError, match="needs a name"):
        register(context)


def test_two_parts_cannot_have_the_same_name(context: PluginContext) -> None:
    context.on(Added, plain)
    with pytest.raises(ValueError, match="two parts named plain"):
        context.every(1, plain)


@pytest.mark.parametrize("types", [(), [], Record, [Added, Record], object(), 7])
def test_types_are_classes_of_facts_and_at_least_one(context: PluginContext, types: Any) -> None:
    with pytest.raises(TypeError):
        context.on(types, plain)


@pytest.mark.parametrize(
    ("types", "classes", "names"),
    [
        (Added, {Added}, set()),
        ("Added", {Added}, set()),
        (["Added", Echoed], {Added, Echoed}, set()),
        (Fact, {Fact}, set()),
        ("NobodySaysThis", {Fact}, {"NobodySaysThis"}),
        (["NobodySaysThis", Said], {Fact}, {"NobodySaysThis", "Said"}),
        (["NobodySaysThis", Fact], {Fact}, set()),
    ],
)
def test_unknown_type_names_may_be_followed(
    context: PluginContext, types: Any, classes: set[type[Fact]], names: set[str]
) -> None:
    context.follow(types, later)
    (delivering,) = context.registration.delivering
    assert (set(delivering.types), set(delivering.names)) == (classes, names)


def test_follower_before_the_start_has_position_0(context: PluginContext) -> None:
    feed = context.follow(Added, later)
    assert (feed.position, feed.behind, feed.waiting_for, feed.again_at) == (0, 0, None, None)


class Unspoken(Request, frozen=True):  # type: ignore[type-arg]
    """Does not say what it answers."""


class Odd(Signal, frozen=True):
    """A signal is no request."""


@pytest.mark.parametrize(
    "register",
    [
        lambda context: context.on(Added, None),
        lambda context: context.on(Added, 7, name="x"),
        lambda context: context.on(Added, plain, on_gap=later),
        lambda context: context.follow(Added, later, jobs="alpha"),
        lambda context: context.serve(Guess, None),
        lambda context: context.serve(Added, plain),
        lambda context: context.serve(Unspoken, plain),
        lambda context: context.replace(Odd, plain),
        lambda context: context.wrap("Guess", later),
        lambda context: context.wrap(Guess, 7),
        lambda context: context.on_signal(Guess, plain),
        lambda context: context.command("x", None),
        lambda context: context.command("x", plain, needs="operator"),
        lambda context: context.on_stop(None),
        lambda context: context.every("1", plain),
        lambda context: context.on(Added, plain, deadline_s=None),
    ],
)
def test_argument_of_the_wrong_type_is_an_error_at_once(
    context: PluginContext, register: Callable[[PluginContext], object]
) -> None:
    with pytest.raises(TypeError):
        register(context)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_times_are_positive_and_finite(context: PluginContext, bad: float) -> None:
    calls: list[Callable[[], object]] = [
        lambda: context.on(Added, plain, name="a", deadline_s=bad),
        lambda: context.follow(Added, later, name="b", deadline_s=bad),
        lambda: context.on_signal(Knock, plain, name="c", deadline_s=bad),
        lambda: context.serve(Guess, plain, deadline_s=bad),
        lambda: context.replace(Guess, plain, deadline_s=bad),
        lambda: context.wrap(Guess, later, deadline_s=bad),
        lambda: context.every(1, plain, name="d", deadline_s=bad),
        lambda: context.every(bad, plain, name="e"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"deadline_s|interval_s"):
            call()


def test_counts_are_at_least_1(context: PluginContext) -> None:
    with pytest.raises(ValueError, match="mailbox_max"):
        context.on(Added, plain, mailbox_max=0)
    with pytest.raises(ValueError, match="batch_max"):
        context.follow(Added, later, batch_max=0)


@pytest.mark.parametrize("name", ["", "Two Words", "x" * 65, "-x"])
def test_a_command_has_a_name_that_can_be_typed(context: PluginContext, name: str) -> None:
    with pytest.raises(ValueError, match="command name must match"):
        context.command(name, plain)


@pytest.mark.parametrize("text", ["two\nlines", "\udce9", 7, None])
def test_the_help_for_a_command_is_a_line_of_text(context: PluginContext, text: Any) -> None:
    with pytest.raises(ValueError, match="help"):
        context.command("x", plain, help=text)


def test_a_command_is_registered_once(context: PluginContext) -> None:
    context.command("x", plain, help="does x", needs=Role.VIEWER)
    with pytest.raises(ValueError, match="the command x is registered"):
        context.command("x", plain)


def test_a_refused_part_leaves_nothing_behind(context: PluginContext) -> None:
    with pytest.raises(ValueError):
        context.on(Added, plain, deadline_s=0)
    context.on(Added, plain)
    assert len(context.registration.observing) == 1


def test_follower_gap_callback_may_be_a_coroutine(context: PluginContext) -> None:
    async def tell(gap: Gap) -> None:
        raise AssertionError(gap)

    context.follow(Added, later, on_gap=tell)


def test_nothing_can_be_registered_later(context: PluginContext) -> None:
    context.close()
    calls: list[Callable[[], object]] = [
        lambda: context.on(Added, plain),
        lambda: context.follow(Added, later),
        lambda: context.on_signal(Knock, plain),
        lambda: context.serve(Guess, plain),
        lambda: context.replace(Guess, plain),
        lambda: context.wrap(Guess, later),
        lambda: context.every(1, plain),
        lambda: context.command("x", plain),
        lambda: context.on_stop(plain),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"only in register\(\)"):
            call()


def test_the_history_is_known_once_a_plugin_is_registered(context: PluginContext) -> None:
    before = context.history
    context.close()
    assert (before, context.history) == ("", "a history")
