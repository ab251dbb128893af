"""How fast is the sparse delta rule? Against the dense rule of equal cost, itself with more slots, and the memory bus.

    python benchmarks/sparse_delta_rule.py [peer] [peer-one-thread] [chunked] [slots] [bandwidth] [saved] [threads]

Shapes are those of the paper's level 1: N = 36864 slots of D = 768 channels, W = R = 64, T = 2048. The peer is the
PyTorch gated delta rule of transformers (qwen3_next) with 6 heads of 64 x 128, the paper's match in FLOPs.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from _harness import Ratio, check_close, in_place_update, report, time_interleaved
from sdm.ops import sparse_delta_rule
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.ops.sparse_delta_rule.native import saved_rows

AVERAGE_DECAY = 0.18


def slots(T: int, count: int, num_slots: int) -> Tensor:
    """[1,T,1,count] distinct sorted slots."""
    rows = [torch.randperm(num_slots)[:count].sort().values for _ in range(T)]
    return torch.stack(rows)[None, :, None].to(torch.int32)


def tokens_of(T: int, N: int, D: int, W: int = 64, R: int = 64) -> Tokens:
    return Tokens(
        write_index=slots(T, W, N),
        write_weight=torch.randn(1, T, 1, W).softmax(-1),
        value=torch.randn(1, T, 1, D),
        beta=torch.rand(1, T, 1),
        log_decay=-2 * AVERAGE_DECAY * torch.rand(1, T, 1),
        read_index=slots(T, R, N),
        read_weight=torch.randn(1, T, 1, R).softmax(-1),
    )


def forward(tokens: Tokens, state: Tensor | None, num_slots: int, backend: str = "native") -> Callable[[], Tensor]:
    @torch.no_grad()
    def run() -> Tensor:
        return sparse_delta_rule(*tokens, initial_state=state, num_slots=num_slots, backend=backend)[0]

    return run


def training(tokens: Tokens, state: Tensor | None, num_slots: int) -> Callable[[], tuple[Tensor, ...]]:
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in tokens]
    leaves = [x for x in inputs if x.requires_grad]
    if state is not None:
        state = state.clone().requires_grad_()
        leaves.append(state)
    grad_y = torch.randn_like(tokens.value)

    def run() -> tuple[Tensor, ...]:
        y, _ = sparse_delta_rule(*inputs, initial_state=state, num_slots=num_slots, backend="native")
        return torch.autograd.grad(y, leaves, grad_y)

    return run


def check(tokens: Tokens, state: Tensor | None, num_slots: int, T: int = 64) -> None:
    """The first tokens of the benchmark's own inputs, against the reference in float64."""
    head = Tokens(*(x[:, :T] for x in tokens))
    double = Tokens(*(x.double() if x.is_floating_point() else x for x in head))
    start = None if state is None else state.double()
    expected, _ = sparse_delta_rule(*double, initial_state=start, num_slots=num_slots, backend="reference")
    got, _ = sparse_delta_rule(*head, initial_state=state, num_slots=num_slots, backend="native")
    check_close("sparse_delta_rule", got, expected, 1e-5)


def peer() -> tuple[Callable[[], object], Callable[[], object]]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    T, heads, d_key, d_value = 2048, 6, 64, 128
    inputs = [
        torch.randn(1, T, heads, d_key),
        torch.randn(1, T, heads, d_key),
        torch.randn(1, T, heads, d_value),
        -2 * AVERAGE_DECAY * torch.rand(1, T, heads),
        torch.rand(1, T, heads),
    ]
    leaves = [x.clone().requires_grad_() for x in inputs]
    grad_y = torch.randn(1, T, heads, d_value)

    @torch.no_grad()
    def run_forward() -> object:
        return torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)

    def run_training() -> object:
        y = torch_chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True)[0]
        return torch.autograd.grad(y, leaves, grad_y)

    return run_forward, run_training


def bench_peer(one_thread: bool = False) -> None:
    """Against the peer; on one thread by processor time, which a busy machine disturbs less."""
    threads = torch.get_num_threads()
    if one_thread:
        torch.set_num_threads(1)
    T, N, D = 2048, 36864, 768
    tokens, state = tokens_of(T, N, D), 0.01 * torch.randn(1, N, D)
    check(tokens, state, N)
    peer_forward, peer_training = peer()
    times = time_interleaved(
        {
            "forward": forward(tokens, state, N),
            "peer forward": peer_forward,
            "forward + backward": training(tokens, state, N),
            "peer forward + backward": peer_training,
        },
        clock=time.thread_time if one_thread else time.perf_counter,
    )
    torch.set_num_threads(threads)
    label = "level 1, one thread" if one_thread else "level 1"
    both = times["forward + backward"] / times["peer forward + backward"]
    ratios = [
        Ratio(f"forward, {label} / peer", times["forward"] / times["peer forward"], 0.75),
        Ratio(f"forward + backward, {label} / peer", both, 0.5),
    ]
    report("sparse_delta_rule_peer" + ("_one_thread" if one_thread else ""), ratios, times)


def bench_chunked() -> None:
    T, N, D = 2048, 36864, 768
    tokens, state = tokens_of(T, N, D), 0.01 * torch.randn(1, N, D)
    run, run_chunked = forward(tokens, state, N), forward(tokens, state, N, "chunked")
    check_close("chunked", run_chunked(), run(), 1e-4)
    times = time_interleaved({"native": run, "chunked": run_chunked})
    report("sparse_delta_rule_chunked", [Ratio("forward / chunked", times["native"] / times["chunked"], 1 / 12)], times)


def bench_slots() -> None:
    T, D, few, many = 2048, 256, 4096, 262144
    candidates: dict[str, Callable[[], object]] = {}
    for N in (few, many):
        tokens = tokens_of(T, N, D)
        check(tokens, None, N)
        candidates[f"forward, {N} slots"] = forward(tokens, None, N)
        candidates[f"forward + backward, {N} slots"] = training(tokens, None, N)
    times = time_interleaved(candidates)
    ratios = [
        Ratio(f"{kind}: {many} / {few} slots", times[f"{kind}, {many} slots"] / times[f"{kind}, {few} slots"], target)
        for kind, target in (("forward", 1.6), ("forward + backward", 2.0))
    ]
    report("sparse_delta_rule_slots", ratios, times)


def bench_bandwidth() -> None:
    ratios, times, bandwidths = [], {}, {}
    updated, update = in_place_update()
    for T, N, D in ((2048, 36864, 768), (2048, 262144, 256)):
        tokens, state = tokens_of(T, N, D), 0.01 * torch.randn(1, N, D)
        check(tokens, state, N)
        label = f"forward, N={N}, D={D}"
        measured = time_interleaved({label: forward(tokens, state, N), "update": update})
        times[label] = measured[label]
        bandwidths[label] = updated / measured["update"]
        share = T * (2 * 64 + 64) * D * 4 / times[label] / bandwidths[label]
        ratios.append(Ratio(f"{label}: bytes moved / time / update bandwidth", share, 0.8, at_least=True))
    report("sparse_delta_rule_bandwidth", ratios, times, {"update_bytes_per_second": bandwidths})


def bench_saved() -> None:
    T = N = 4096
    D = 32
    tokens = tokens_of(T, N, D)._replace(log_decay=torch.full((1, T, 1), -AVERAGE_DECAY))
    share = saved_rows(tokens, N) / (T * 64)
    grads = {}
    grad_y = torch.randn(1, T, 1, D, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in tokens]
        y, _ = sparse_delta_rule(*inputs, num_slots=N, backend="native")
        grads[dtype] = torch.autograd.grad(y, [x for x in inputs if x.requires_grad], grad_y.to(dtype))
    errors = [
        check_close("gradient", a, e, 1e-5) for a, e in zip(grads[torch.float32], grads[torch.float64], strict=True)
    ]
    ratios = [
        Ratio("rows saved at |g| = 0.18, T = N = 4096 / T x W", share, 0.07),
        Ratio("largest gradient error against float64", max(errors), 1e-5),
    ]
    report("sparse_delta_rule_saved", ratios, {})


def bench_threads() -> None:
    T, N, D = 2048, 36864, 768
    tokens, state = tokens_of(T, N, D), 0.01 * torch.randn(1, N, D)
    run = training(tokens, state, N)

    def with_threads(count: int) -> Callable[[], object]:
        def call() -> object:
            torch.set_num_threads(count)
            return run()

        return call

    one, two = with_threads(1)(), with_threads(2)()
    if not all(torch.equal(a, b) for a, b in zip(one, two, strict=True)):
        raise SystemExit("one and two threads give different gradients; no ratio is reported")
    times = time_interleaved({"one thread": with_threads(1), "two threads": with_threads(2)})
    ratio = Ratio("1 thread / 2 threads, forward + backward", times["one thread"] / times["two threads"], 1.5, True)
    report("sparse_delta_rule_threads", [ratio], times)


BENCHMARKS = {
    "peer": bench_peer,
    "peer-one-thread": functools.partial(bench_peer, one_thread=True),
    "chunked": bench_chunked,
    "slots": bench_slots,
    "bandwidth": bench_bandwidth,
    "saved": bench_saved,
    "threads": bench_threads,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or BENCHMARKS:
        torch.manual_seed(0)
        BENCHMARKS[name]()
