from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forged.checkpoint as fc
from forged import leaf_types
from forged.checkpoint import CheckpointException, ShardedArray
from forged.errors import PeerError, RequestRefused
from forged.leaf_types import PerRank, leaf_type_for, leaf_types_of, package_in, package_of
from forged.worker.state_transfer.encoding import Arriving, pack
from tests import boxed_values
from tests.boxed_values import Boxed, Model, Optimizer

PACKAGE = "tests.boxed_values"


@pytest.fixture(autouse=True)
def provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(leaf_types.PROVIDERS, PACKAGE, PACKAGE)
    leaf_types._package_of.cache_clear()


def transferred(state: Any, into: Any) -> Any:
    packed = pack(state)
    arriving = Arriving(packed.head)
    for target, source in zip(arriving.parts, packed.parts, strict=True):
        target[:] = source
    arriving.adopt(into)
    return into


class TestProviders:
    def test_package_is_that_of_the_class_or_of_a_base(self) -> None:
        class Derived(Boxed):
            pass

        for value in (Boxed(1), Derived(1), Optimizer()):
            assert package_of(value) == PACKAGE
        assert leaf_types_of(Derived(1)) == boxed_values.LEAF_TYPES
        assert leaf_type_for(Derived(1)) is boxed_values.LEAF_TYPES[0]
        assert leaf_type_for(Optimizer()) is None

    @pytest.mark.parametrize("value", [1, None, "x", [], {}, np.ones(1), PACKAGE])
    def test_other_values_have_no_package(self, value: Any) -> None:
        assert package_of(value) is None
        assert leaf_types_of(value) == ()

    def test_module_whose_name_begins_alike_is_another_package(self) -> None:
        kind = type("Tensor", (), {"__module__": "torchvision.x"})
        assert package_of(kind()) is None

    def test_package_of_an_object_is_that_of_its_class_or_of_its_first_leaf(self) -> None:
        class Wrapper:
            pass

        assert package_in(Optimizer(), {}) == PACKAGE
        assert package_in(Wrapper(), {"a": [1, (Boxed(1),)]}) == PACKAGE
        assert package_in(Wrapper(), {"a": 1}) is None

    def test_torch_is_not_imported_without_its_values(self) -> None:
        command = (
            "import sys, numpy, forged.checkpoint as fc, forged.worker.state_transfer.encoding as e;"
            "e.pack({'a': numpy.ones(2)}); print([m for m in sys.modules if m.startswith(('torch', 'forged.torch'))])"
        )
        done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"


class TestTransfer:
    def test_leaves_arrive_in_the_present_ones_or_are_made(self) -> None:
        present = Boxed(np.zeros(3))
        into = transferred({"a": Boxed(np.arange(3.0)), "b": [Boxed([1])], "c": PerRank(Boxed([2]))}, {"a": present})
        assert into["a"] is present
        assert present.data.tolist() == [0, 1, 2]
        assert isinstance(into["b"][0], Boxed)
        assert into["c"].data.tolist() == [2]

    def test_leaves_that_share_memory_are_sent_once(self) -> None:
        data = np.arange(3)
        packed = pack({"a": Boxed(data), "b": Boxed(data), "c": Boxed(data[:2])})
        assert len(packed.parts) == 2
        into = transferred({"a": Boxed(data), "b": Boxed(data)}, {})
        assert into["a"].data is into["b"].data

    def test_optimizer_that_was_empty_takes_the_state_of_a_used_one(self) -> None:
        used, fresh = Optimizer(), Optimizer()
        used.step(0, 2)
        transferred({"opt": used}, {"opt": fresh})
        assert fresh.entries.keys() == {0, 2}
        assert fresh.entries[2]["moment"].data.tolist() == [2, 2]

    def test_refused_leaf_is_named_with_its_path(self) -> None:
        with pytest.raises(RequestRefused, match=r"state\['a'\]\[1\] is locked") as raised:
            pack({"a": [0, Boxed(1, is_locked=True)]})
        assert (raised.value.code, raised.value.fix) == ("state_unfit", "open it first")

    def test_state_of_an_unknown_package_is_refused_and_not_imported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        packed = pack({"a": Boxed(1)})
        monkeypatch.delitem(leaf_types.PROVIDERS, PACKAGE)
        with pytest.raises(PeerError, match="description is invalid"):
            Arriving(packed.head)

    def test_state_of_a_package_that_is_not_installed_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        packed = pack({"a": Boxed(1)})
        monkeypatch.setitem(leaf_types.PROVIDERS, PACKAGE, "tests.there_is_no_such_module")
        with pytest.raises(PeerError, match=f"a state has values of {PACKAGE}") as raised:
            Arriving(packed.head)
        assert raised.value.code == "state_invalid"


class TestCheckpoints:
    def test_leaves_are_saved_and_loaded_with_nothing_configured(self, tmp_path: Path) -> None:
        fc.save(tmp_path / "a", {"a": Boxed(np.arange(3)), "s": ShardedArray(Boxed(np.ones(2)), (2,), (0,))})
        present, part = Boxed(np.zeros(3, int)), Boxed(np.zeros(2))
        into = {"a": present, "s": ShardedArray(part, (2,), (0,))}
        loaded = fc.load(tmp_path / "a", into=into)
        assert loaded["a"] is present
        assert present.data.tolist() == [0, 1, 2]
        assert part.data.tolist() == [1, 1]
        assert fc.load(tmp_path / "a")["a"].tolist() == [0, 1, 2]

    def test_refused_leaf_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointException, match="a/#1 is locked") as raised:
            fc.save(tmp_path / "a", {"a": [0, Boxed(1, is_locked=True)]})
        assert raised.value.fix == "open it first"

    @pytest.mark.parametrize("used", [(), (2, 3)], ids=["empty", "used"])
    @pytest.mark.parametrize("saved", [(), (0, 2)], ids=["saved-empty", "saved-used"])
    @pytest.mark.parametrize("wrap", [lambda opt: {"opt": opt}, lambda opt: opt], ids=["in a dict", "alone"])
    def test_optimizer_has_the_saved_entries(
        self, saved: tuple[int, ...], used: tuple[int, ...], wrap: Callable[[Any], Any], tmp_path: Path
    ) -> None:
        one, other = Optimizer(), Optimizer()
        one.step(*saved)
        other.step(*used)
        fc.save(tmp_path / "a", wrap(one))
        fc.load(tmp_path / "a", into=wrap(other))
        assert tuple(other.entries) == saved
        for number in saved:
            assert other.entries[number]["moment"].data.tolist() == [number, number]

    def test_run_resumes_an_optimizer_that_was_empty(self, tmp_path: Path) -> None:
        one, other = Optimizer(), Optimizer()
        one.step(0)
        with fc.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, {"opt": one})
        with fc.Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.resume({"opt": other}) == 1
        assert other.entries[0]["moment"].data.tolist() == [0, 0]

    def test_object_that_takes_no_new_entries_is_refused_what_it_lacks(self, tmp_path: Path) -> None:
        one, other = Model(), Model()
        one.step(0)
        fc.save(tmp_path / "a", {"model": one})
        with pytest.raises(CheckpointException, match="model/entries/#0/moment is not in the state"):
            fc.load(tmp_path / "a", into={"model": other})

    def test_tensors_that_are_not_selected_make_no_entries(self, tmp_path: Path) -> None:
        one, other = Optimizer(), Optimizer()
        one.step(0, 1)
        fc.save(tmp_path / "a", {"opt": one})
        fc.load(tmp_path / "a", into={"opt": other}, only="opt/entries/#1/*")
        assert other.entries.keys() == {1}
