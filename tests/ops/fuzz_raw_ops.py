"""Calls `torch.ops.sdm.*` with arguments that do not fit together: `fuzz_raw_ops.py SEED COUNT`.

A tracer or a program can call these with anything. Each call must raise or give the right answer: it does not depend on
the memory around its arguments, it leaves that memory alone, and it is the reference's. Run as a process of its own,
because what reads out of bounds may also end the process.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers import random_tokens, relative_error
from sdm.ops import gated_delta_rule, product_key_topk, sparse_delta_rule

GUARD = 4096  # elements of known content on both sides of each argument
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
SIZES = [-1, 0, 1, 2, 3, 10, 2**31, 2**40, 2**62]
Arguments = dict[str, Any]


def sparse_problem() -> Arguments:
    dtype = random.choice(DTYPES[:2])
    packed = random.random() < 0.3
    B, T, H, W, R, N, D = (random.randint(1, n) for n in (3, 9, 3, 4, 5, 12, 20))
    B, W = 1 if packed else B, min(W, N)
    tokens = random_tokens(B, T, H, W, min(R, N), N, D, dtype=dtype, per_write=random.random() < 0.3)
    cut = random.randint(0, T)
    offsets = torch.tensor([0, cut, T]) if packed else None
    lead = [(), (2 if packed else B,)][random.randint(0, 1)]
    initial = torch.randn(*lead, H, N, D, dtype=dtype) if random.random() < 0.7 else None
    return tokens._asdict() | {
        "initial_state": initial,
        "num_slots": N,
        "cu_seqlens": offsets,
        "slot_rule": random.random() < 0.3,
    }


def sparse_rule() -> Arguments:
    plan = {"rounding_limit": 192.0}
    return (
        sparse_problem() | {"output_final_state": random.random() < 0.5, "save_residual": random.random() < 0.5} | plan
    )


def sparse_backward() -> Arguments:
    problem = sparse_problem()
    value, offsets = problem["value"], problem["cu_seqlens"]
    sequences = value.shape[0] if offsets is None else 2
    final = value.new_ones(sequences, value.shape[2], problem["num_slots"], value.shape[3])
    grads = {"grad_y": torch.randn_like(value), "grad_final_state": random.choice([None, final])}
    residual = {"residual": torch.randn_like(value)}
    plan = {"grad_initial": random.random() < 0.5, "rounding_limit": 192.0}
    return grads | residual | problem | plan


def sparse_step() -> Arguments:
    problem = sparse_problem()
    names = list(problem)[:7]
    token = {name: problem[name][:, 0].contiguous() for name in names}
    B, H, D = token["value"].shape
    return (
        {"state": torch.randn(B, H, problem["num_slots"], D, dtype=token["value"].dtype)} | token | {"slot_rule": False}
    )


def sparse_in_place() -> Arguments:
    problem = sparse_problem()
    tokens = dict(list(problem.items())[:7])
    B, _, H, D = tokens["value"].shape
    state = torch.randn(B, H, problem["num_slots"], D, dtype=tokens["value"].dtype)
    return {"state": state} | tokens | {"slot_rule": problem["slot_rule"]}


def gated_tokens(*lead: int) -> Arguments:
    dtype, K, D = random.choice(DTYPES[:2]), random.randint(1, 6), random.randint(1, 40)
    tokens = {name: torch.randn(*lead, size, dtype=dtype) for name, size in (("query", K), ("key", K), ("value", D))}
    decays = random.choice([lead, (*lead, K)])
    return tokens | {"beta": torch.rand(*lead, dtype=dtype), "log_decay": -torch.rand(*decays, dtype=dtype)}


def gated_rule() -> Arguments:
    packed = random.random() < 0.3
    B, T, H = 1 if packed else random.randint(1, 3), random.randint(1, 40), random.randint(1, 3)
    tokens = gated_tokens(B, T, H)
    offsets = torch.tensor([0, random.randint(0, T), T]) if packed else None
    key, value = tokens["key"], tokens["value"]
    initial = value.new_ones(2 if packed else B, H, key.shape[-1], value.shape[-1])
    return tokens | {"initial_state": initial, "cu_seqlens": offsets, "save": random.random() < 0.5}


def gated_backward() -> Arguments:
    rule = gated_rule()
    *_, residual, saved = torch.ops.sdm.gated_delta_rule(*(rule | {"save": True}).values())
    names = ("query", "key", "beta", "log_decay", "cu_seqlens")
    grads = {"grad_y": torch.randn_like(rule["value"]), "grad_final_state": torch.randn_like(rule["initial_state"])}
    return {name: rule[name] for name in names} | {"residual": residual, "saved": saved} | grads


def gated_step() -> Arguments:
    B, H = random.randint(1, 3), random.randint(1, 3)
    token = gated_tokens(B, H)
    state = token["value"].new_ones(B, H, token["key"].shape[-1], token["value"].shape[-1])
    return {"state": state} | token


def topk() -> Arguments:
    n = random.randint(1, 9)
    scores = torch.randn(random.randint(1, 20), 2 * n, dtype=random.choice(DTYPES[:2]))
    return {"scores": scores, "k": random.randint(1, n * n)}


def topk_backward() -> Arguments:
    arguments = topk()
    values, index = torch.ops.sdm.product_key_topk(*arguments.values())
    return {"grad_values": values, "index": index, "n": arguments["scores"].shape[-1] // 2}


def sparse_answer(a: Arguments) -> Tensor:
    tokens = list(a.values())[:7]
    update = "slot" if a["slot_rule"] else "delta"
    options = {"num_slots": a["num_slots"], "cu_seqlens": a["cu_seqlens"], "update": update, "backend": "reference"}
    return sparse_delta_rule(*tokens, initial_state=a["initial_state"], **options)[0]


def sparse_step_answer(a: Arguments) -> Tensor:
    state, *token, slot = a.values()
    update = "slot" if slot else "delta"
    tokens = [x.unsqueeze(1) for x in token]
    return sparse_delta_rule(*tokens, initial_state=state, update=update, backend="reference")[0].squeeze(1)


def sparse_in_place_answer(a: Arguments) -> Tensor:
    state, *tokens, slot = a.values()
    update = "slot" if slot else "delta"
    return sparse_delta_rule(*tokens, initial_state=state, update=update, backend="reference")[0]


def gated_answer(a: Arguments) -> Tensor:
    *tokens, initial, offsets, _ = a.values()
    return gated_delta_rule(*tokens, initial_state=initial, cu_seqlens=offsets, backend="reference")[0]


def gated_step_answer(a: Arguments) -> Tensor:
    state, *token = a.values()
    return gated_delta_rule(*(x.unsqueeze(1) for x in token), initial_state=state, backend="reference")[0].squeeze(1)


def topk_answer(a: Arguments) -> Tensor:
    return product_key_topk(a["scores"], a["k"], backend="reference")[0]


OPS: dict[str, tuple[Callable[[], Arguments], Callable[[Arguments], Tensor] | None]] = {
    "sparse_delta_rule": (sparse_rule, sparse_answer),
    "sparse_delta_rule_backward": (sparse_backward, None),
    "sparse_delta_rule_": (sparse_in_place, sparse_in_place_answer),
    "sparse_delta_step_": (sparse_step, sparse_step_answer),
    "gated_delta_rule": (gated_rule, gated_answer),
    "gated_delta_rule_backward": (gated_backward, None),
    "gated_delta_step_": (gated_step, gated_step_answer),
    "product_key_topk": (topk, topk_answer),
    "product_key_topk_backward": (topk_backward, None),
}


def changed_tensor(x: Tensor, others: list[Tensor]) -> Any:
    kind = random.randrange(9)
    if kind == 0 and x.dim():  # one size is another
        shape = list(x.shape)
        dim = random.randrange(x.dim())
        shape[dim] = max(0, shape[dim] + random.choice([-1, 1, 7, -100]))
        return torch.zeros(shape, dtype=x.dtype)
    if kind == 1 and x.dim():
        return x[0] if x.shape[0] and random.random() < 0.5 else x[..., None]
    if kind == 2:
        return x.to(random.choice(DTYPES))
    if kind == 3 and x.dim() > 1:  # the same numbers, in another order of memory
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == 4 and x.numel() and not x.is_floating_point():
        x = x.clone(memory_format=torch.contiguous_format)
        x.view(-1)[random.randrange(x.numel())] = random.choice([-1, 12, 100, 2**30])
        return x
    if kind == 5 and x.dim():  # strides of zero
        return x[:1].expand(x.shape) if x.shape[0] else x
    if kind == 6:
        return random.choice(others)
    if kind == 7:
        return x.to("meta")
    return None


def mutated(arguments: Arguments) -> Arguments:
    arguments = dict(arguments)
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    for _ in range(random.choice([0, 1, 1, 1, 2])):
        name = random.choice([name for name, x in arguments.items() if not isinstance(x, bool | float)])
        x = arguments[name]
        arguments[name] = changed_tensor(x, tensors) if isinstance(x, Tensor) else random.choice(SIZES)
    return arguments


def guarded(x: Any, fill: int) -> tuple[Any, Tensor | None]:
    """The same tensor, strides included, amid `fill`; and all of that memory."""
    if not isinstance(x, Tensor) or x.device.type != "cpu":
        return x, None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    memory = torch.full((extent + 2 * GUARD,), fill, dtype=x.dtype)
    inside = memory[GUARD : GUARD + extent].as_strided(x.shape, x.stride()) if x.numel() else memory[:0].view(x.shape)
    if x.numel():
        torch.as_strided(memory, x.shape, x.stride(), GUARD).copy_(x) if 0 not in x.stride() else memory[
            GUARD : GUARD + extent
        ].copy_(torch.as_strided(x, (extent,), (1,)))
    return inside, memory


def answer(op: str, arguments: Arguments, fill: int) -> list[Tensor]:
    pairs = {name: guarded(x, fill) for name, x in arguments.items()}
    output = getattr(torch.ops.sdm, op)(*(x for x, _ in pairs.values()))
    for name, (_, memory) in pairs.items():
        if memory is not None:
            around = torch.cat([memory[:GUARD], memory[-GUARD:]])
            assert bool((around == torch.full_like(around, fill)).all()), f"{op} wrote outside {name}"
    changed = [pairs["state"][0]] if "state" in pairs else []
    if op == "gated_delta_rule":
        output = output[:3]  # the saved states have room for one segment more than some sequences use
    return [*((output,) if isinstance(output, Tensor) else output), *changed]


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


def main(seed: int, count: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    answers = errors = 0
    for trial in range(count):
        op = random.choice(list(OPS))
        draw, expected = OPS[op]
        arguments = mutated(draw())
        shapes = {name: (list(x.shape), x.dtype) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        print(trial, op, shapes, flush=True)
        try:
            first = answer(op, arguments, 0)
        except AssertionError:
            raise
        except Exception:
            errors += 1
            continue
        if any(x.device.type == "meta" for x in first):
            continue  # traced: no memory was touched
        second = answer(op, arguments, 1)
        assert all(same(a, b) for a, b in zip(first, second, strict=True)), "the answer depends on memory around it"
        if expected is not None:
            deviation = relative_error(first[0].double(), expected(arguments).double())
            assert deviation < 1e-4, f"deviates from the reference by {deviation}"
        answers += 1
    print("answers", answers, "errors", errors)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
