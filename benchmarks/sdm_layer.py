"""What does a whole SDM layer cost? Addressing against the memory, the layer against a dense one, decoding against
attention over a long cache.

    python benchmarks/sdm_layer.py [addressing] [layer] [decode]

The layer is that of the paper's level 1: width 768, N = 36864 slots, W = R = 64, T = 2048. The dense peer is the same
layer with the PyTorch gated delta rule of transformers (qwen3_next), 6 heads of 64 x 128, in place of the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import sdm
from _harness import Ratio, check_close, report, time_interleaved
from sdm.layers.modules import decay_gate
from sdm.ops import product_key_topk
from sparse_delta_rule import forward, tokens_of

WIDTH, SLOTS, T = 768, 36864, 2048


class DensePeer(sdm.SparseDeltaMemory):
    """The layer's own projections, gates, norm and output around the dense rule of equal FLOPs."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        heads = self.hidden_size // 128
        query, key, value = (
            projection(x).unflatten(-1, (heads, -1)) for projection in (self.query_proj, self.key_proj, self.value_proj)
        )
        beta = torch.sigmoid(self.beta_proj(x))
        _, log_decay = decay_gate(self.decay_proj(x), self.decay_bias, self.decay_log_rate)
        gates = (gate.expand(*x.shape[:2], heads) for gate in (log_decay, beta))
        y = torch_chunk_gated_delta_rule(query, key, value, *gates, use_qk_l2norm_in_kernel=True)[0]
        return self._output(x, y.flatten(-2).unflatten(-1, (self.num_heads, -1)))


def bench_addressing() -> None:
    scores = torch.randn(2, 1, T, 1, 2 * 192)
    for half in scores:
        values, index = product_key_topk(half[:, :64], 64, backend="native")
        expected, expected_index = product_key_topk(half[:, :64].double(), 64, backend="reference")
        if not torch.equal(index, expected_index):
            raise SystemExit("product_key_topk selects other slots than the reference; no ratio is reported")
        check_close("product_key_topk", values, expected, 1e-6)
    tokens, state = tokens_of(T, SLOTS, WIDTH), 0.01 * torch.randn(1, SLOTS, WIDTH)

    @torch.no_grad()
    def both() -> list[tuple[Tensor, Tensor]]:
        return [product_key_topk(half, 64) for half in scores]

    times = time_interleaved({"both top-k calls": both, "op forward": forward(tokens, state, SLOTS)})
    ratio = Ratio("both top-k calls / op forward", times["both top-k calls"] / times["op forward"], 0.3)
    report("addressing", [ratio], times)


def step(layer: Callable[[Tensor], Tensor], parameters: list[Tensor]) -> Callable[[], object]:
    x = torch.randn(1, T, WIDTH, requires_grad=True)

    def run() -> object:
        return torch.autograd.grad(layer(x).square().sum(), [x, *parameters], allow_unused=True)

    return run


def bench_layer() -> None:
    layer = sdm.SparseDeltaMemory(WIDTH)
    reference = sdm.SparseDeltaMemory(WIDTH, backend="reference").double()
    reference.load_state_dict({name: x.double() for name, x in layer.state_dict().items()})
    x = torch.randn(1, 32, WIDTH)
    with torch.no_grad():
        check_close("SparseDeltaMemory", layer(x), reference(x.double()), 1e-4)
    del reference
    peer = DensePeer(WIDTH, learned_initial_state=False)
    null = sdm.SparseDeltaMemory(WIDTH, learned_initial_state=False)
    times = time_interleaved(
        {
            "layer": step(layer, list(layer.parameters())),
            "layer without learned M0": step(null, list(null.parameters())),
            "peer layer": step(peer, list(peer.parameters())),
        }
    )
    ratios = [Ratio("layer forward + backward / peer layer", times["layer"] / times["peer layer"], 0.9)]
    report("sdm_layer", ratios, times)


def bench_decode() -> None:
    layer = sdm.SparseDeltaMemory(WIDTH).eval()
    state = layer.start_state(1).memory
    x = torch.randn(1, WIDTH)

    # The layer's projections are what attention has too; compared are addressing and memory with attention itself.
    with torch.no_grad():
        sequence = x.unsqueeze(1)
        token = layer._tokens(sequence, sequence, None, None)
        scores = torch.stack((layer.query_proj(x), layer.key_proj(x)))
        value, beta, log_decay = (tensor.squeeze(1) for tensor in token[2:5])
        whole, _ = layer(sequence, state=state, return_state=True)
        check_close("step", layer.step_(x, state.clone()), whole[:, 0], 1e-5)

    @torch.no_grad()
    def memory() -> Tensor:
        weight, index = layer._address(layer._scores(scores, None), layer.num_reads)
        return sdm.ops.sparse_delta_step_(state, index[1], weight[1], value, beta, log_decay, index[0], weight[0])

    candidates: dict[str, Callable[[], object]] = {"memory": memory}
    query = torch.randn(1, WIDTH // 128, 1, 128)
    targets = {8192: 1 / 40, 32768: 1 / 150, 131072: 1 / 600}
    for length in targets:
        cache = torch.randn(2, 1, WIDTH // 128, length, 128)

        @torch.no_grad()
        def attend(cache: Tensor = cache) -> Tensor:
            return F.scaled_dot_product_attention(query, cache[0], cache[1])

        candidates[f"attention over {length}"] = attend
    # A stream decodes step after step: the memory's turn is as many steps as the longest attention takes time for.
    times = time_interleaved(candidates, calls={"memory": 64})
    ratios = [
        Ratio(f"decode step of the memory / SDPA, {length} tokens", times["memory"] / times[label], goal)
        for (length, goal), label in zip(targets.items(), list(candidates)[1:], strict=True)
    ]
    report("decode_step", ratios, times)


BENCHMARKS = {"addressing": bench_addressing, "layer": bench_layer, "decode": bench_decode}

if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or BENCHMARKS:
        BENCHMARKS[name]()
