"""What does it take to serve many users at the width of level 1, one table of 113 MB each?

    python benchmarks/sessions.py

Decodes sessions with different pasts as one batch and one by one, counts the bytes that a session owns, lets sessions
join and leave, and opens and closes a thousand. Times are medians of calls in turn in one process.
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path

import torch

import sdm
from _harness import Ratio, report

LAYERS = {"vocab_size": 1024, "hidden_size": 768, "num_hidden_layers": 4, "global_layer_interval": 4}
SESSIONS, JOINED = 32, 8


def opened(model: sdm.SDMForCausalLM, tokens: int) -> sdm.Session:
    session = sdm.Session(model)
    session.add(torch.randint(0, 1024, (tokens,)).tolist())
    return session


def seconds(batch: object, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        before = time.perf_counter()
        batch.step()  # type: ignore[attr-defined]
        times.append(time.perf_counter() - before)
    return times


def resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def build() -> sdm.SDMForCausalLM:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    return sdm.SDMForCausalLM(sdm.SDMConfig(global_layer="sdm", **LAYERS)).eval()


def close(*sessions: sdm.Session) -> None:
    for session in sessions:
        session.close()


def shares(model: sdm.SDMForCausalLM) -> dict[int, float]:
    """Bytes of a session behind some tokens / those of whole tables."""
    full = sdm.cost(model.config).state_bytes()
    session, result = sdm.Session(model), {}
    for tokens in (100, 1000, 10_000):
        session.add(torch.randint(0, 1024, (tokens - session.length,)).tolist())
        next(session.generate(1))
        result[tokens] = session.nbytes / full
        print(f"after {tokens} tokens: {session.nbytes / 1e6:.1f} MB, {result[tokens]:.3f} of {full / 1e6:.1f} MB")
    close(session)
    return result


def batch_speed(model: sdm.SDMForCausalLM, rounds: int = 7) -> tuple[float, dict[str, float]]:
    """Sessions of unequal pasts as a batch and one by one, in turn."""
    sessions = [opened(model, 16 + place) for place in range(SESSIONS)]
    batch = sdm.Session.batch(sessions, max_new_tokens=1000)
    alone = [session.fork() for session in sessions]
    single = [sdm.Session.batch([session], max_new_tokens=1000) for session in alone]
    seconds(batch, 2)
    for each in single:
        seconds(each, 2)
    together, one_by_one = [], []
    for _ in range(rounds):
        together += seconds(batch, 2)
        one_by_one.append(sum(seconds(each, 1)[0] for each in single))
    close(*sessions, *alone)
    times = {"32 sessions, a batch": statistics.median(together)}
    times["32 sessions, one by one"] = statistics.median(one_by_one)
    speedup = times["32 sessions, one by one"] / times["32 sessions, a batch"]
    print(f"32 sessions as a batch / one by one: {speedup:.2f}", flush=True)
    return speedup, times


def joining(model: sdm.SDMForCausalLM, steps: int = 15) -> tuple[float, dict[str, float]]:
    """A batch of eight before and after its sessions have left and others have joined.

    Eight sessions that nobody joins take turns with it, so that a machine that becomes busier slows both.
    """
    sessions, steady = [opened(model, 32) for _ in range(2 * JOINED)], [opened(model, 32) for _ in range(JOINED)]
    batch = sdm.Session.batch(sessions[:JOINED], max_new_tokens=1000)
    others = sdm.Session.batch(steady, max_new_tokens=1000)

    def in_turn() -> tuple[float, float]:
        times = [(seconds(batch, 1)[0], seconds(others, 1)[0]) for _ in range(steps)]
        return statistics.median(mine for mine, _ in times), statistics.median(theirs for _, theirs in times)

    seconds(batch, 3)
    seconds(others, 3)
    before, steady_before = in_turn()
    changes = []
    for place in range(JOINED):
        start = time.perf_counter()
        batch.leave(sessions[place])
        sessions[JOINED + place].add([1])
        batch.join(sessions[JOINED + place], max_new_tokens=1000)
        changes.append(time.perf_counter() - start)
        seconds(batch, 2)
    after, steady_after = in_turn()
    close(*sessions, *steady)
    kept = (before / steady_before) / (after / steady_after)
    print(f"speed in a batch of 8 after others join and leave / before: {kept:.3f}", flush=True)
    times = {"8 sessions, a batch": before, "8 others, a batch": after, "leave and join": statistics.median(changes)}
    return kept, times


def growth(model: sdm.SDMForCausalLM, count: int = 1000) -> float:
    """Growth of resident memory by sessions that are opened, used and closed."""

    def use(number: int) -> int:
        for _ in range(number):
            session = opened(model, 4)
            next(session.generate(2))
            session.close()
        gc.collect()
        return resident()

    start = use(100)
    result = (use(count) - start) / start
    print(f"growth of resident memory by {count} sessions: {result:.4f}", flush=True)
    return result


def main() -> None:
    model = build()
    share = shares(model)
    speedup, times = batch_speed(model)
    kept, more = joining(model)
    ratios = [
        Ratio("32 sessions as a batch / one by one, tokens per second", speedup, 4.0, at_least=True),
        Ratio("bytes of a session after 100 tokens / a full table", share[100], 0.25),
        Ratio("bytes of a session after 1,000 tokens / a full table", share[1000], 0.9),
        Ratio("tokens per second in a batch of 8 after others join and leave / before", kept, 0.9, at_least=True),
        Ratio("growth of resident memory by 1,000 sessions", growth(model), 0.01),
    ]
    notes = {f"bytes after {tokens} tokens / a full table": value for tokens, value in share.items()}
    report("sessions", ratios, times | more, notes)


if __name__ == "__main__":
    main()
