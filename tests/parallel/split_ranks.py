"""What each rank of a small world does for `test_split.py`: compare a split model with the whole one, which it has too.

Run with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))

from sdm.layers import SparseDeltaMemory, sparse_delta_memory
from sdm.models import SDMForCausalLM
from sdm.models.likelihood import nll
from sdm.parallel import TimeSlice, count_traffic, split_channels, split_time
from sdm.ranks import Ranks
from sdm.run.mesh import Mesh
from sdm.training.parallel import Parallel
from tiny_models import STACKS, tiny_model, tokens


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def assert_close(found: Tensor, expected: Tensor, name: str = "loss") -> None:
    """In float64 nothing but rounding is left."""
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9, msg=lambda text: f"{name}: {text}")


def model_of(stack: str) -> SDMForCausalLM:
    torch.manual_seed(3)
    return tiny_model(stack, num_attention_heads=4).double()


def batch(layout: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows; packed documents that ranks do not divide; or rows of which a rank has less than a window."""
    torch.manual_seed(5)
    shape = {"rows": (2, 24), "documents": (1, 23), "short": (2, 5)}[layout]
    ids, targets = tokens(*shape), tokens(*shape)
    targets[:, ::5] = -100
    return ids, targets, torch.tensor([0, 3, 4, 4, 19, 23]) if layout == "documents" else None


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def check_channels(stack: str, layout: str) -> None:
    whole = model_of(stack)
    split = copy.deepcopy(whole)
    shards = split_channels(split, world())
    ids, targets, bounds = batch(layout)
    expected = nll(whole, ids, targets, bounds)[0]
    with count_traffic() as traffic:
        found = nll(split, ids, targets, bounds)[0]
    assert_close(found, expected)
    wanted, got = gradients(whole, expected), gradients(split, found)
    assert wanted.keys() == got.keys()
    for name, grad in got.items():
        shard = shards.get(name)
        assert_close(grad, wanted[name] if shard is None else shard.take(wanted[name]), name)
    assert set(traffic.kinds(world())) == {"all_reduce"}


def check_context(stack: str, layout: str) -> None:
    whole = model_of(stack)
    split = copy.deepcopy(whole)
    split_time(split, world())
    ids, targets, bounds = batch(layout)
    expected = nll(whole, ids, targets, bounds)[0]
    part = TimeSlice.of(ids, targets, bounds, dist.get_rank(), dist.get_world_size())
    found = nll(split, part.input_ids, part.targets, part.cu_seqlens)[0]
    total = found.detach().clone()
    dist.all_reduce(total)
    assert_close(total, expected.detach())
    wanted, got = gradients(whole, expected), gradients(split, found)
    for name, grad in wanted.items():
        own = got[name].clone() if name in got else torch.zeros_like(grad)
        dist.all_reduce(own)
        assert_close(own, grad, f"{stack} {name}")


def check_channels_and_context(stack: str, layout: str) -> None:
    """Two by two: the channels that a rank has are split once more along with time."""
    whole = model_of(stack)
    split = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "channel"))
    shards = split_channels(split, mesh["channel"].get_group())
    time = mesh["context"].get_group()
    split_time(split, time)
    ids, targets, bounds = batch(layout)
    expected = nll(whole, ids, targets, bounds)[0]
    part = TimeSlice.of(ids, targets, bounds, dist.get_rank(time), 2)
    found = nll(split, part.input_ids, part.targets, part.cu_seqlens)[0]
    wanted, got = gradients(whole, expected), gradients(split, found)
    for name, grad in wanted.items():
        own = got[name].clone()
        dist.all_reduce(own, group=time)
        assert_close(own, shards[name].take(grad) if name in shards else grad, name)


def check_states(stack: str, layout: str) -> None:
    """Carried states and decoding steps of split channels."""
    whole = model_of(stack)
    split = copy.deepcopy(whole)
    split_channels(split, world())
    ids, _, _ = batch("rows")
    greedy: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    found, expected = (model.generate(ids[:, :7], **greedy) for model in (split, whole))  # type: ignore[misc]
    assert torch.equal(found, expected)  # type: ignore[arg-type]


def check_refusals(stack: str, layout: str) -> None:
    for split, model, words in (
        (split_channels, tiny_model("gdn"), "no sparse delta memory"),
        (split_channels, tiny_model("sdm", hidden_size=34), "must divide the 17 value channels"),
        (split_time, tiny_model("gdn", hidden_size=36, num_attention_heads=3), "must divide the 3 heads"),
        (split_time, tiny_model("fwpkm"), "is a FastWeightMemory; sequences can be split in FullAttention"),
    ):
        with pytest.raises(ValueError, match=words):
            split(model, world())
    model = model_of(stack)
    split_time(model, world())
    for arguments in ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, {"use_cache": True}):
        with pytest.raises(ValueError, match="split over ranks"):
            model(tokens(1, 4), **arguments)


class Wire(TorchDispatchMode):
    """Counts bytes that go into torch's own collectives, whoever calls them."""

    kinds: ClassVar = {"c10d._allgather_base_": "all_gather", "c10d._reduce_scatter_base_": "reduce_scatter"}

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removesuffix(".default")
        if name.startswith("c10d."):
            kind = self.kinds.get(name, name)
            sent = args[1] if name in self.kinds else args[0]  # after where the result goes, or in its place
            self.sent[kind] = self.sent.get(kind, 0) + sum(x.nbytes for x in tree_leaves(sent))
        return func(*args, **(kwargs or {}))


def check_recurrence(stack: str, layout: str) -> None:
    """Within the recurrence nothing is sent, forward or backward, though the layer around it sends."""
    layer = next(module for module in model_of(stack).modules() if isinstance(module, SparseDeltaMemory))
    split_channels(layer, world())
    rule, inside, calls = sparse_delta_memory.sparse_delta_rule, Wire(), []

    def watched(*tokens: Tensor, **options: Any) -> Any:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tokens]
        with inside:
            torch.autograd.grad(rule(*leaves, **options)[0].sum(), [x for x in leaves if x.requires_grad])
        calls.append(len(leaves))
        return rule(*tokens, **options)

    sparse_delta_memory.sparse_delta_rule = watched
    try:
        with Wire() as around:
            layer(torch.randn(2, 9, 32, dtype=torch.float64)).sum().backward()
    finally:
        sparse_delta_memory.sparse_delta_rule = rule
    assert calls == [7]
    assert inside.sent == {}
    assert around.sent.keys() == {"c10d.allreduce_"}


def print_traffic() -> None:
    """What this rank sends in a forward and a backward pass of each stack, for the plan's tests."""
    ids, targets, _ = batch("rows")
    found: dict[str, dict[str, int]] = {}
    for stack in ("sdm", "gdn", "shifted"):
        model = model_of(stack).float()
        ranks = Ranks(dist.get_rank(), dist.get_world_size())
        Parallel(Mesh(data=ranks.size), ranks).shard(model)
        with Wire() as wire:
            model.nll(ids, targets)[0].backward()
        found[f"data {stack}"] = wire.sent
    for dim, stacks in (("channel", ("sdm", "shifted")), ("context", ("sdm", "gdn", "mixed", "shifted"))):
        for stack in stacks:
            model = model_of(stack).float()
            part = TimeSlice(ids, targets, None)
            if dim == "channel":
                split_channels(model, world())
            else:
                split_time(model, world())
                part = TimeSlice.of(ids, targets, None, dist.get_rank(), dist.get_world_size())
            with count_traffic() as traffic:
                nll(model, part.input_ids, part.targets)[0].backward()
            found[f"{dim} {stack}"] = traffic.kinds(world())
    print(json.dumps(found), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1:] == ["traffic"]:
        print_traffic()
        dist.destroy_process_group()
        return
    checks: list[tuple[Callable[[str, str], None], str, str]] = [
        *((check_channels, stack, layout) for stack in ("sdm", "shifted", "mixed") for layout in ("rows", "documents")),
        *((check_context, stack, layout) for stack in STACKS if stack != "fwpkm" for layout in ("rows", "documents")),
        *((check_context, stack, "short") for stack in ("sdm", "shifted", "convolved", "mamba2", "kda", "raven")),
        (check_recurrence, "sdm", "rows"),
        (check_states, "sdm", "rows"),
        (check_refusals, "sdm", "rows"),
    ]
    if dist.get_world_size() == 4:
        checks += [(check_channels_and_context, "shifted", "rows"), (check_channels_and_context, "sdm", "documents")]
    failed = False
    for check, stack, layout in checks:
        try:
            check(stack, layout)
        except Exception as error:
            failed = True
            print(f"{check.__name__}({stack}, {layout}): {error!r}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    print(f"{len(checks)} checks", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
