"""What taking tokens back costs: `python benchmarks/rewinding.py`.

Prints, at the width of level 1, the time of a decode step with and without a journal, of verifying six tokens in place
and with a copy of the tables, and of the deterministic mode; and for levels 1, 8 and 13 the bytes of a token's journal
beside those of the state.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import sdm
import sdm.layers

REPEATS = 7
DRAFT = 6


def medians(*calls: Callable[[], object]) -> list[float]:
    """Median milliseconds of each call, in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(1000 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def journal_bytes(level: int) -> tuple[int, int]:
    """Bytes of one token's journal and of the whole state at a level of the ladder, in float32."""
    config = sdm.ladder(level)
    width, memories = config.hidden_size, config.layer_types.count("sdm")
    windows = len(config.layer_types) - memories
    # Rows, weights and slots of the writes and the value; old and new keys and values of a window.
    writes = config.num_writes * (4 * width + 12 * config.num_memory_heads) + 4 * width
    journal = memories * writes + windows * 4 * 4 * width
    return journal, memories * 4 * config.num_slots * width + windows * 2 * 4 * config.sliding_window * width


@torch.no_grad()
def main() -> None:
    """Print the measurements."""
    config = sdm.ladder(1)
    model = sdm.SDMForCausalLM(config).eval()
    ids = torch.randint(config.vocab_size, (1, 200))
    plain, recording = sdm.SDMCache(config), sdm.SDMCache(config)
    recording.record()
    for cache in (plain, recording):
        model(ids, past_key_values=cache)
    token, draft = ids[:, :1], ids[:, :DRAFT]
    without, with_journal = medians(
        lambda: model(token, past_key_values=plain), lambda: model(token, past_key_values=recording)
    )
    print(f"decode step: {without:.1f} ms, with a journal {with_journal:.1f} ms, ratio {with_journal / without:.3f}")

    memory = next(block.mixer for block in model.model.layers if block.layer_type == "sdm")
    x, state = torch.randn(1, DRAFT, config.hidden_size), memory.start_state(1)
    copying, in_place = medians(
        lambda: memory(x, state=state, return_state=True), lambda: memory.extend_(x, state, record=lambda undo: None)
    )
    print(
        f"an SDM layer over {DRAFT} tokens: copying the table {copying:.1f} ms, in place and recorded "
        f"{in_place:.1f} ms, ratio {in_place / copying:.3f}"
    )

    def verify() -> None:
        model(draft, past_key_values=recording)
        recording.crop(-DRAFT)

    def step_by_step() -> None:
        for place in range(DRAFT):
            model(draft[:, place : place + 1], past_key_values=plain)

    verifying, stepping = medians(verify, step_by_step)
    print(f"verifying {DRAFT} tokens and taking them back: {verifying:.1f} ms; {DRAFT} steps: {stepping:.1f} ms")
    model(token, past_key_values=recording)
    measured = recording.journal.entries[-1].nbytes if recording.journal else 0
    print(f"bytes of a token's journal, measured at level 1: {measured}")

    prompt = ids[:, :128]

    def prefill() -> None:
        model(prompt, past_key_values=sdm.SDMCache(config))

    def step() -> None:
        model(token, past_key_values=plain)

    def fixed(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with sdm.layers.deterministic():
                call()

        return run

    plain_prefill, fixed_prefill, plain_step, fixed_step = medians(prefill, fixed(prefill), step, fixed(step))
    print(f"deterministic prefill of 128 tokens: {fixed_prefill:.0f} ms, otherwise {plain_prefill:.0f} ms")
    print(f"deterministic step: {fixed_step:.1f} ms, otherwise {plain_step:.1f} ms")
    for level in (1, 8, 13):
        journal, whole = journal_bytes(level)
        share = f"1/{whole // journal}"
        print(f"level {level}: {journal / 1e6:.2f} MB of journal a token, state {whole / 1e6:.0f} MB: {share}")


if __name__ == "__main__":
    main()
