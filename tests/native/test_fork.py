"""A process may fork while its threads are inside an op (data loaders, servers). The child must not wait for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdm.ops import available_backends

pytestmark = [
    pytest.mark.skipif("native" not in available_backends(), reason="the compiled core is missing"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
]

CODE = """
import os, sys, threading, time
import torch
from helpers import random_tokens
from sdm.ops import sparse_delta_rule, sparse_delta_step_

forks, at_work, num_threads = map(int, sys.argv[1:])
torch.set_num_threads(num_threads)
tokens = random_tokens(1, 64, 1, W=32, R=32, N=128, D=64, dtype=torch.float32)
step = [x[:, 0] for x in random_tokens(256, 1, 1, W=2, R=2, N=8, D=4, dtype=torch.float32)]


def run():
    return sparse_delta_rule(*tokens, num_slots=128, backend="native")[0]


def work():
    # Hundreds of sequences: nearly all of the time goes to taking scratch memory and giving it back.
    state = torch.zeros(256, 1, 8, 4)
    while not done:
        sparse_delta_step_(state, *step)


expected, done = run(), False  # from here on this thread has threads of OpenMP
threads = [threading.Thread(target=work, daemon=True) for _ in range(at_work)]
for thread in threads:
    thread.start()
for fork in range(forks):
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(run(), expected) else 1)
    deadline = time.monotonic() + 30
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, 9)
            sys.exit(f"the child of fork {fork} hangs")
        time.sleep(0.0005)
    if status:
        sys.exit(f"the child of fork {fork} ended with status {status}")
done = True
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize(
    ("forks", "at_work", "threads"),
    [(3, 0, 2), (10, 1, 2), (30, 1, 1), pytest.param(300, 2, 1, marks=pytest.mark.slow)],
)
def test_a_forked_child_computes(forks: int, at_work: int, threads: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(forks), str(at_work), str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
