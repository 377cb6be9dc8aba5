from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forged.checkpoint as fc
import forged.torch as ft
from forged.checkpoint import (
    CheckpointException,
    DistributedCheckpoint,
    LoadOptions,
    SaveOptions,
    StorageOptions,
    create_storage,
)
from forged.errors import RequestRefused
from tests.checkpoint.fixtures.rank_group import SimulatedRank, SimulatedRanks
from tests.torch.test_tensors import bits_of, transferred

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True, foreach=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, centered=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "tensor-lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-2)),
}


class Training:
    """A small training, from a seed."""

    def __init__(self, seed: int, optimizer: str = "adamw", dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
        ).to(dtype)
        self.opt = OPTIMIZERS[optimizer](self.model.parameters())
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 10)
        self.dtype = dtype
        self.state = ft.State(model=self.model, opt=self.opt, sched=self.sched)

    def backward(self) -> None:
        self.model(torch.randn(16, 4, dtype=self.dtype)).float().square().mean().backward()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.backward()
            self.opt.step()
            self.sched.step()
            self.opt.zero_grad()

    def bits(self) -> list[bytes]:
        return [bits_of(value) for value in self.model.state_dict().values()]


def saved_and_loaded(state: Any, into: Any, folder: Path) -> None:
    where = folder / f"c{len(list(folder.glob('*.json')))}"
    fc.save(where, {"all": state})
    fc.load(where, into={"all": into})


def moved(state: Any, into: Any, folder: Path) -> None:
    transferred({"all": state}, {"all": into})


@pytest.fixture(params=[saved_and_loaded, moved], ids=["checkpoint", "transfer"])
def move(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any, Any], None]:
    """Brings a state into another one."""
    how = request.param
    return lambda state, into: how(state, into, tmp_path)


Move = Callable[[Any, Any], None]


class TestTraining:
    @pytest.mark.parametrize("steps_before", [0, 2], ids=["fresh", "used"])
    @pytest.mark.parametrize("steps", [0, 3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_another_process_continues_bit_for_bit(
        self, move: Move, optimizer: str, dtype: torch.dtype, steps: int, steps_before: int
    ) -> None:
        one = Training(1, optimizer, dtype)
        one.step(steps)
        other = Training(2, optimizer, dtype)
        other.step(steps_before)
        torch.manual_seed(5)
        move(one.state, other.state)
        other.step(3)
        found, rate = other.bits(), other.sched.get_last_lr()
        torch.manual_seed(5)
        one.step(3)
        assert one.bits() == found
        assert one.sched.get_last_lr() == rate

    def test_generators_of_torch_belong_to_the_state(self, move: Move) -> None:
        torch.manual_seed(3)
        own = torch.Generator().manual_seed(4)
        state = ft.State(own=own)
        into = ft.State(own=torch.Generator().manual_seed(9))
        expected = None
        saved = state.state_dict()
        expected = torch.rand(3).tolist(), torch.rand(3, generator=own).tolist()
        state.load_state_dict({**saved, "rng": saved["rng"].value})
        torch.manual_seed(8)
        after = torch.get_rng_state()
        state.load_state_dict({**saved, "rng": saved["rng"].value})
        move(state, into)
        assert (torch.rand(3).tolist(), torch.rand(3, generator=into.part_at("own")).tolist()) == expected
        assert not torch.equal(torch.get_rng_state(), after)

    def test_without_rng_the_generators_stay(self, move: Move) -> None:
        torch.manual_seed(3)
        state, into = ft.State(rng=False, w=torch.ones(2)), ft.State(rng=False, w=torch.zeros(2))
        before = torch.get_rng_state()
        move(state, into)
        assert torch.equal(torch.get_rng_state(), before)
        assert into.part_at("w").tolist() == [1, 1]

    def test_plain_objects_without_state_work_like_parts(self, move: Move) -> None:
        one, other = Training(1), Training(2)
        one.step(3)
        names = ("model", "opt", "sched")
        move({name: getattr(one, name) for name in names}, {name: getattr(other, name) for name in names})
        torch.manual_seed(5)
        one.step(2)
        torch.manual_seed(5)
        other.step(2)
        assert one.bits() == other.bits()

    def test_partly_used_optimizer_gets_and_loses_entries(self, move: Move) -> None:
        def make(used: list[int]) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
            parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
            opt = torch.optim.AdamW(parameters)
            for number in used:
                parameters[number].grad = torch.full((3,), float(number + 1))
            opt.step()
            return parameters, opt

        _, one = make([0, 1])
        parameters, other = make([1, 2])
        move({"opt": one}, {"opt": other})
        assert set(other.state) == {parameters[0], parameters[1]}
        for number in (0, 1):
            there = one.state_dict()["state"][number]
            for name, value in other.state[parameters[number]].items():
                assert torch.equal(value, there[name])


class TestParts:
    def test_dicts_lists_tensors_and_arrays_are_parts(self, move: Move) -> None:
        def make(value: float) -> dict[str, Any]:
            return {
                "history": [value, {"w": torch.full((2,), value)}],
                "best": {"loss": value, "at": np.full(2, value), "opt": Training(int(value)).opt},
                "array": np.full(3, value),
                "tensor": torch.full((3,), value),
            }

        there, here = make(1.0), make(2.0)
        array, tensor, best, inner = here["array"], here["tensor"], here["best"], here["best"]["at"]
        move(ft.State(**there), ft.State(**here))
        assert array.tolist() == tensor.tolist() == [1, 1, 1]
        assert here["best"] is best
        assert inner.tolist() == [1, 1]
        assert best["loss"] == here["history"][0] == 1.0
        assert here["history"][1]["w"].tolist() == [1, 1]

    def test_immutable_part_is_refused(self) -> None:
        with pytest.raises(RequestRefused, match=r"epoch of ft\.State is a int") as raised:
            ft.State(epoch=3)
        assert raised.value.code == "state_unfit"

    def test_part_that_the_checkpoint_has_and_the_state_lacks_is_refused(self, tmp_path: Path) -> None:
        one = Training(1)
        one.step()
        fc.save(tmp_path / "a", {"s": one.state})
        with pytest.raises(CheckpointException, match="is not in the state"):
            fc.load(tmp_path / "a", into={"s": ft.State(opt=one.opt)})

    def test_selected_load_makes_no_entries_of_an_optimizer(self, tmp_path: Path) -> None:
        one, other = Training(1), Training(2)
        one.step()
        fc.save(tmp_path / "a", {"s": one.state})
        fc.load(tmp_path / "a", into={"s": other.state}, only="s/model/*")
        assert one.bits() == other.bits()
        assert not other.opt.state

    @pytest.mark.parametrize("kind", ["whole", "layer", "both"])
    def test_compiled_modules_have_the_names_of_plain_ones(self, move: Move, kind: str) -> None:
        def compiled(model: torch.nn.Sequential) -> Any:
            if kind != "whole":
                model[0] = torch.compile(model[0])
            return torch.compile(model) if kind != "layer" else model

        one, other = Training(1), Training(2)
        plain = ft.State(model=one.model)
        model = compiled(other.model)
        state = ft.State(model=model)
        assert list(state.state_dict()["model"]) == list(plain.state_dict()["model"])
        move(plain, state)
        assert one.bits() == other.bits()
        back = Training(3)
        move(state, ft.State(model=back.model))
        assert one.bits() == back.bits()

    def test_grad_scaler_is_a_part(self, move: Move) -> None:
        one, other = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
        one.scale(torch.ones(1))
        one.update(2.0)
        move(ft.State(scaler=one), ft.State(scaler=other))
        assert other.state_dict() == one.state_dict()

    @pytest.mark.parametrize("kind", ["multi", "lambda", "sequential", "plateau", "one_cycle", "cyclic"])
    def test_schedulers_continue(self, move: Move, kind: str) -> None:
        def make() -> tuple[torch.optim.Optimizer, Any]:
            opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
            rates = torch.optim.lr_scheduler
            match kind:
                case "multi":
                    return opt, rates.MultiStepLR(opt, [2, 4])
                case "lambda":
                    return opt, rates.LambdaLR(opt, lambda epoch: 0.9**epoch)
                case "sequential":
                    parts = [rates.ConstantLR(opt, 0.1), rates.ExponentialLR(opt, 0.9)]
                    return opt, rates.SequentialLR(opt, parts, [2])
                case "plateau":
                    return opt, rates.ReduceLROnPlateau(opt, patience=1)
                case "one_cycle":
                    return opt, rates.OneCycleLR(opt, 0.5, total_steps=20)
                case _:
                    return opt, rates.CyclicLR(opt, 0.1, 0.5)

        def steps(opt: torch.optim.Optimizer, sched: Any, count: int) -> list[float]:
            found = []
            for _ in range(count):
                opt.step()
                sched.step(1.0) if kind == "plateau" else sched.step()
                found.append(opt.param_groups[0]["lr"])
            return found

        (opt, sched), (opt2, sched2) = make(), make()
        steps(opt, sched, 3)
        move(ft.State(opt=opt, sched=sched), ft.State(opt=opt2, sched=sched2))
        assert steps(opt, sched, 5) == steps(opt2, sched2, 5)
        if kind == "multi":
            assert type(sched2.milestones) is Counter

    def test_module_with_a_state_of_its_own_is_a_part(self, move: Move) -> None:
        class Counting(torch.nn.Linear):
            count = 0

            def state_dict(self) -> dict[str, Any]:
                return {"count": self.count, "weight": self.weight.detach()}

            def load_state_dict(self, state: Any) -> None:
                self.count = state["count"]

        one, other = Counting(2, 2), Counting(2, 2)
        one.count = 3
        move(ft.State(model=one), ft.State(model=other))
        assert other.count == 3

    async def test_each_rank_has_its_generators_again_and_a_new_one_keeps_its_own(self, tmp_path: Path) -> None:
        def generators(rank: int) -> torch.Tensor:
            return torch.Generator().manual_seed(rank).get_state()

        class OfRank:
            """A state with the generators of one rank, as if it had a process of its own."""

            def __init__(self, seed: int) -> None:
                self.own = generators(seed)

            def state_dict(self) -> Any:
                torch.set_rng_state(self.own)
                return ft.State(w=torch.ones(1)).state_dict()

            def load_state_dict(self, state: Any) -> None:
                ft.State(w=torch.ones(1)).load_state_dict(state)
                self.own = torch.get_rng_state()

        storage = create_storage(StorageOptions("local", {"base_path": str(tmp_path)}))

        def checkpoints(world_size: int) -> list[DistributedCheckpoint]:
            together = SimulatedRanks(world_size)
            return [DistributedCheckpoint(SimulatedRank(together, rank), storage) for rank in range(world_size)]

        saves = [one.save(OfRank(rank), options=SaveOptions("a")) for rank, one in enumerate(checkpoints(2))]
        await asyncio.gather(*saves)
        states = [OfRank(10 + rank) for rank in range(3)]
        await asyncio.gather(
            *(one.load(state, options=LoadOptions("a")) for one, state in zip(checkpoints(3), states, strict=True))
        )
        for state, seed in zip(states, (0, 1, 12), strict=True):
            assert torch.equal(state.own, generators(seed))

    def test_rank_that_no_generators_were_saved_for_keeps_its_own(self) -> None:
        state = ft.State(w=torch.zeros(1))
        torch.manual_seed(7)
        before = torch.get_rng_state()
        state.load_state_dict({"w": torch.ones(1)})
        assert torch.equal(torch.get_rng_state(), before)


class TestSnapshot:
    def test_repeated_step_has_the_result_of_an_undisturbed_one(self) -> None:
        torch.manual_seed(1)
        one, other = Training(1), Training(1)
        one.step(2)
        other.step(0)
        torch.manual_seed(1)
        other = Training(1)
        other.step(2)
        assert one.bits() == other.bits()
        torch.manual_seed(2)
        random.seed(2)
        np.random.seed(2)
        one.step()
        drawn = random.random(), np.random.rand()
        torch.manual_seed(2)
        random.seed(2)
        np.random.seed(2)
        other.state.snapshot()
        other.backward()
        random.random()
        np.random.rand()
        other.state.restore()
        assert all(parameter.grad is None for parameter in other.model.parameters())
        other.step()
        assert one.bits() == other.bits()
        assert (random.random(), np.random.rand()) == drawn

    def test_gradients_that_existed_have_their_values_again(self) -> None:
        training = Training(1)
        training.backward()
        before = [(parameter.grad, bits_of(parameter.grad)) for parameter in training.model.parameters()]
        for _ in range(2):
            training.state.snapshot()
            training.backward()
            training.opt.zero_grad()
            training.backward()
            training.state.restore()
            after = [(parameter.grad, bits_of(parameter.grad)) for parameter in training.model.parameters()]
            assert [bits for _, bits in after] == [bits for _, bits in before]
            assert all(now is then for (now, _), (then, _) in zip(after, before, strict=True))

    def test_buffer_that_was_replaced_is_the_same_again(self) -> None:
        model = torch.nn.BatchNorm1d(2)
        state = ft.State(model=model)
        buffer = model.running_mean
        state.snapshot()
        model.running_mean = torch.ones(2)
        model.register_buffer("late", torch.ones(1))
        state.restore()
        assert model.running_mean is buffer
        assert model.running_mean.tolist() == [0, 0]

    def test_copies_are_made_in_the_same_memory(self) -> None:
        model = torch.nn.BatchNorm1d(2)
        state = ft.State(model=model)
        state.snapshot()
        kept = {key: one.copy.data_ptr() for key, one in state._snapshot._buffers.items()}
        state.snapshot()
        assert {key: one.copy.data_ptr() for key, one in state._snapshot._buffers.items()} == kept

    def test_unscaled_gradients_may_be_unscaled_again(self) -> None:
        parameter = torch.nn.Parameter(torch.ones(2))
        opt = torch.optim.SGD([parameter], lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        state = ft.State(opt=opt, scaler=scaler)
        for _ in range(2):
            state.snapshot()
            scaler.scale(parameter.sum()).backward()
            scaler.unscale_(opt)
            assert parameter.grad is not None
            assert parameter.grad.tolist() == [1, 1]
            state.restore()

    def test_restore_without_a_snapshot_changes_nothing(self) -> None:
        training = Training(1)
        training.backward()
        training.state.restore()
        assert all(parameter.grad is not None for parameter in training.model.parameters())
        training.state.snapshot()
        training.state.load_state_dict({**training.state.state_dict(), "rng": {}})
        training.backward()
        training.state.restore()
        assert all(parameter.grad is not None for parameter in training.model.parameters())
