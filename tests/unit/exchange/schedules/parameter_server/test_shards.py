from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchmn.comm.object_codec import build, describe
from torchmn.exchange.schedules.parameter_server.shards import (
    ShardMemory,
    assign_shards,
    hyper_parameters,
    optimizer_like,
)


def parameters(sizes: list[int]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]


class TestAssign:
    @settings(deadline=None)
    @given(st.lists(st.integers(0, 1000), max_size=20), st.integers(1, 6))
    def test_each_parameter_has_one_owner_and_order_is_kept(
        self, sizes: list[int], num_servers: int
    ) -> None:
        given_ones = parameters(sizes)
        shards = assign_shards(given_ones, num_servers)
        assert len(shards) == num_servers
        names = [name for name, _ in given_ones]
        assert sorted(n for s in shards for n, _ in s) == sorted(names)
        for shard in shards:
            positions = [names.index(name) for name, _ in shard]
            assert positions == sorted(positions)

    @settings(deadline=None)
    @given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, 6))
    def test_servers_differ_by_one_parameter_at_most(
        self, sizes: list[int], num_servers: int
    ) -> None:
        loads = [
            sum(p.numel() for _, p in s) for s in assign_shards(parameters(sizes), num_servers)
        ]
        assert max(loads) - min(loads) <= max(sizes)


class TestStripeMemory:
    def test_slots_have_shapes_and_share_the_buffers(self) -> None:
        items = [
            ("a", nn.Parameter(torch.zeros(3, 5))),
            ("b", nn.Parameter(torch.zeros(7, dtype=torch.float16))),
            ("c", nn.Parameter(torch.zeros(2, dtype=torch.complex64))),
            ("d", nn.Parameter(torch.zeros(0))),
        ]
        memory, other = ShardMemory(items), ShardMemory(items)
        assert {n: s.shape for n, s in memory.slots.items()} == {n: p.shape for n, p in items}
        for slot in memory.slots.values():
            slot.fill_(2)
        assert sum(float(b.float().sum()) for b in memory.buffers) == 2 * (15 + 7 + 2)
        other.fill(memory.buffers)
        assert all(torch.equal(other.slots[n], memory.slots[n]) for n in memory.slots)


class TestHyperParameters:
    def test_keep_every_bit_in_a_message(self) -> None:
        model = nn.Linear(3, 2)
        inner = torch.optim.AdamW(
            [{"params": [model.weight], "lr": 0.1 / 3}, {"params": [model.bias], "amsgrad": True}]
        )
        copy = nn.Parameter(torch.zeros(2, 3))
        clone = optimizer_like(inner, {model.weight: copy})
        inner.param_groups[0]["lr"] = torch.tensor(0.25)
        inner.param_groups[1]["betas"] = (0.5, 1 / 3)
        body, _ = describe(hyper_parameters(inner))
        received = build(json.loads(json.dumps(body)), [])
        for group, values in zip(clone.param_groups, received, strict=True):
            group.update(values)
        assert clone.param_groups[0]["lr"] == 0.25
        assert clone.param_groups[1]["betas"] == (0.5, 1 / 3)
        assert clone.param_groups[1]["amsgrad"] is True
        assert clone.param_groups[0]["params"] == [copy]
        assert clone.param_groups[1]["params"] == []

    def test_a_list_that_is_changed_in_place_is_seen(self) -> None:
        inner = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
        inner.param_groups[0]["betas"] = [0.9, 0.99]
        before = hyper_parameters(inner)
        inner.param_groups[0]["betas"][0] = 0.5
        assert before[0]["betas"] == (0.9, 0.99)
        assert hyper_parameters(inner) != before

    def test_a_clone_shares_neither_hooks_nor_schedulers(self) -> None:
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        inner.register_step_pre_hook(lambda *_: pytest.fail("the worker's hook"))
        copies = {p: nn.Parameter(p.detach().clone()) for p in model.parameters()}
        clone = optimizer_like(inner, copies)
        for copy in copies.values():
            copy.grad = torch.ones_like(copy)
        clone.step()
        for parameter, copy in copies.items():
            assert torch.allclose(copy, parameter - 0.1)
        assert not inner.state
