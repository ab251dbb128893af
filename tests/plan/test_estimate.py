"""Plans: what they say about traffic is what ranks send, what they say about sizes is arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from processes import run_ranks
from sdm.cli import main
from sdm.models import cost
from sdm.models.cost import ladder
from sdm.models.likelihood import nll
from sdm.plan import ACCELERATORS, Workload, make_plan
from sdm.plan.dry_run import dry_run
from sdm.plan.estimate import traffic
from sdm.run.mesh import Mesh
from tiny_models import tiny_config, tiny_model

H100 = ACCELERATORS["h100"]


def test_planned_traffic_is_what_ranks_send() -> None:
    """To the byte: the rank in the middle of two is the second."""
    script = Path(__file__).parents[1] / "parallel" / "split_ranks.py"
    sent = json.loads(run_ranks(script, 2, "traffic")[1].splitlines()[-1])
    assert sent
    for name, kinds in sent.items():
        dim, stack = name.split()
        config = tiny_config(stack, num_attention_heads=4)
        work = Workload(config, Mesh(**{dim: 2}), 24, 2, 2, "float32", "none")
        planned = traffic(work, dry_run(work))
        assert planned.pop(dim) == kinds, name
        # Those along "context" also share weights, which are not dealt to them there.
        assert all(not other for dim, other in planned.items() if dim != "data")


def test_blocks_keep_what_a_real_step_keeps() -> None:
    """The bytes that autograd saves in a dry run are those of real numbers."""
    model, work = tiny_model("sdm"), Workload(tiny_config("sdm"), Mesh(), 40, 2, 2, "float32", "none")
    own, kept = {x.untyped_storage()._cdata for x in model.parameters()}, {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage()._cdata not in own:
            kept[x.untyped_storage()._cdata] = x
        return x

    x, total = torch.randn(2, 40, 32, requires_grad=True), 0
    for block in model.model.layers:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = block(x)
        total += sum(x.untyped_storage().nbytes() for x in kept.values())
        x = y.detach().requires_grad_()
    blocks = dry_run(work)
    assert sum(blocks[kind].saved for kind in work.model.layer_types) == total


def test_long_rows_are_linear_in_their_length() -> None:
    """What is found by two short dry runs is what a long one finds."""
    from sdm.plan import dry_run as module

    work = Workload(tiny_config("sdm"), Mesh(context=2), 6000, 1, 1)
    extended = dry_run(work)
    limit = module.LONGEST
    try:
        module.LONGEST = 10_000
        whole = dry_run(work)
    finally:
        module.LONGEST = limit
    for kind, block in whole.items():
        assert extended[kind].saved == pytest.approx(block.saved, rel=0.01)
        assert extended[kind].forward == block.forward


def test_states_and_tables_shrink_with_channels() -> None:
    """M0, its moments and gradients, and the tables, on four channel ranks and on one."""

    def tables(channel: int) -> float:
        work = Workload(ladder(1), Mesh(channel=channel), 2048, 4, 1)
        blocks = dry_run(work)
        own = sum(blocks[kind].initial_state for kind in work.model.layer_types)
        return 16 * own + make_plan(work, H100).memory.states

    assert tables(4) / tables(1) == pytest.approx(0.25)


def test_the_parameters_are_those_of_the_cost() -> None:
    work = Workload(ladder(8), Mesh(), 512, 1, 1)
    blocks, costs = dry_run(work), cost(work.model)
    inner = sum(blocks[kind].weights for kind in work.model.layer_types) + work.model.hidden_size
    assert inner == costs.non_embedding_parameters
    assert sum(blocks[kind].initial_state for kind in work.model.layer_types) == costs.initial_state_parameters


def test_pieces_are_gathered_for_each_and_exchanged_once() -> None:
    work = Workload(tiny_config("sdm"), Mesh(data=2), 16, 4, 2, "float32", "none")
    blocks = dry_run(work)
    one, two = (traffic(replace(work, batch_size=rows), blocks)["data"] for rows in (4, 8))
    assert replace(work, batch_size=8).pieces == 2
    assert two["all_gather"] == 2 * one["all_gather"]
    assert two["reduce_scatter"] == one["reduce_scatter"]
    whole = cost(work.model).parameters + cost(work.model).initial_state_parameters
    assert 4 * whole <= one["reduce_scatter"] < 4.1 * whole  # shares that are too short are filled up


def test_kept_weights_are_gathered_once() -> None:
    work = Workload(tiny_config("sdm"), Mesh(data=2), 16, 4, 2, "float32", "none")
    kept, blocks = replace(work, keep_weights=True), dry_run(work)
    twice, once = (traffic(one, blocks)["data"] for one in (work, kept))
    inner = 4 * sum(blocks[kind].shard for kind in work.model.layer_types)
    assert twice["all_gather"] - once["all_gather"] == inner
    assert twice["reduce_scatter"] == once["reduce_scatter"]
    # They are all there when the first gradients are.
    whole = cost(work.model).parameters + cost(work.model).initial_state_parameters
    less, more = (make_plan(one, H100).memory for one in (work, kept))
    assert less.weights + less.initial_states < more.weights + more.initial_states
    assert more.weights + more.initial_states == pytest.approx(4 * 1.5 * whole, rel=0.01)  # and a share of a half
    alone = replace(work, mesh=Mesh())
    assert make_plan(alone, H100).memory == make_plan(replace(alone, keep_weights=True), H100).memory


def test_more_ranks_need_less_of_each() -> None:
    work = Workload(ladder(8), Mesh(data=8), 8192, 64, 1)
    fewer, more = make_plan(work, H100), make_plan(replace(work, mesh=Mesh(data=64)), H100)
    assert more.memory.optimizer < fewer.memory.optimizer / 7.9
    assert more.matrix_seconds == pytest.approx(fewer.matrix_seconds / 8)
    sliced = make_plan(replace(work, mesh=Mesh(data=8, context=8)), H100)
    assert sliced.memory.scratch < fewer.memory.scratch / 2
    # The logits are of as many tokens as before, and the addresses of all tokens are on every rank.
    logits = 3 * 4 * work.model.loss_chunk_size * work.model.vocab_size
    assert sliced.memory.activations - logits < (fewer.memory.activations - logits) / 6


def test_a_real_loss_runs_where_plans_were_made() -> None:
    """No process group is left behind."""
    make_plan(Workload(tiny_config("sdm"), Mesh(context=2, channel=2), 16, 1, 1), H100)
    assert not torch.distributed.is_initialized()
    ids = torch.zeros(1, 5, dtype=torch.long)
    assert nll(tiny_model("sdm"), ids, ids)[0].isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "999999999999"], r"--rows must be between 1 and 1,048,576, got 999999999999"),
        (["--rows", "257"], r"--rows = 257 is more than the 256 rows of a step"),
        (["--gpus", "100000000"], r"--gpus must be between 1 and 1,000,000"),
        (["--gpus", "0"], r"--gpus must be between 1 and"),
        (["--sequence-length", "999999999999", "--batch-tokens", "999999999999"], r"--sequence-length must be between"),
        (["--gpus", "1000000"], r"no mesh of 1000000 GPUs works"),
    ],
)
def test_sizes_beyond_all_machines_are_refused_at_once(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdm.plan.estimate.make_plan", lambda *given: pytest.fail("planned"))
    with pytest.raises(SystemExit, match=message):
        main(["plan", *arguments])
