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


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    config = sdm.SDMConfig(global_layer="sdm", **LAYERS)
    model = sdm.SDMForCausalLM(config).eval()
    full = sdm.cost(config).state_bytes()

    # Bytes of a session.
    shares = {}
    session = sdm.Session(model)
    for tokens in (100, 1000, 10_000):
        session.add(torch.randint(0, 1024, (tokens - session.length,)).tolist())
        next(session.generate(1))
        shares[tokens] = session.nbytes / full
        print(f"after {tokens} tokens: {session.nbytes / 1e6:.1f} MB, {shares[tokens]:.3f} of {full / 1e6:.1f} MB")
    session.close()

    # A batch and one by one, of unequal pasts.
    sessions = [opened(model, 16 + place) for place in range(SESSIONS)]
    batch = sdm.Session.batch(sessions, max_new_tokens=1000)
    alone = [session.fork() for session in sessions]
    single = [sdm.Session.batch([session], max_new_tokens=1000) for session in alone]
    seconds(batch, 2)
    for each in single:
        seconds(each, 2)
    together, one_by_one = [], []
    for _ in range(7):
        together += seconds(batch, 2)
        one_by_one.append(sum(seconds(each, 1)[0] for each in single))
    speedup = statistics.median(one_by_one) / statistics.median(together)
    times = {"32 sessions, a batch": statistics.median(together)}
    times["32 sessions, one by one"] = statistics.median(one_by_one)
    for session in (*sessions, *alone):
        session.close()
    del batch, single, sessions, alone

    # Joining and leaving.
    sessions = [opened(model, 32) for _ in range(2 * JOINED)]
    batch = sdm.Session.batch(sessions[:JOINED], max_new_tokens=1000)
    seconds(batch, 3)
    before = seconds(batch, 15)
    changes = []
    for place in range(JOINED):
        start = time.perf_counter()
        batch.leave(sessions[place])
        sessions[JOINED + place].add([1])
        batch.join(sessions[JOINED + place], max_new_tokens=1000)
        changes.append(time.perf_counter() - start)
        seconds(batch, 2)
    after = seconds(batch, 15)
    kept = statistics.median(before) / statistics.median(after)
    times |= {"8 sessions, a batch": statistics.median(before), "8 others, a batch": statistics.median(after)}
    times["leave and join"] = statistics.median(changes)
    for session in sessions:
        session.close()
    del batch, sessions, session

    # A thousand sessions.
    def use(count: int) -> None:
        for _ in range(count):
            session = opened(model, 4)
            next(session.generate(2))
            session.close()

    use(100)
    gc.collect()
    start = resident()
    use(1000)
    gc.collect()
    growth = (resident() - start) / start
    ratios = [
        Ratio("32 sessions as a batch / one by one, tokens per second", speedup, 4.0, at_least=True),
        Ratio("bytes of a session after 100 tokens / a full table", shares[100], 0.25),
        Ratio("bytes of a session after 1,000 tokens / a full table", shares[1000], 0.9),
        Ratio("tokens per second in a batch of 8 after others join and leave / before", kept, 0.9, at_least=True),
        Ratio("growth of resident memory by 1,000 sessions", growth, 0.01),
    ]
    notes = {f"bytes after {tokens} tokens / a full table": share for tokens, share in shares.items()}
    report("sessions", ratios, times, notes)


if __name__ == "__main__":
    main()
