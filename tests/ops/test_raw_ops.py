"""The registered ops `torch.ops.sdm.*` called directly, past the public functions and their checks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import random_tokens
from sdm.ops import available_backends

pytestmark = pytest.mark.skipif("native" not in available_backends(), reason="the compiled core is missing")

PLAN = (False, True, 192.0)


def test_inconsistent_arguments_raise_or_are_answered_rightly() -> None:
    tests = Path(__file__).parents[1]
    command = [sys.executable, str(tests / "ops" / "fuzz_raw_ops.py"), "0", "1500"]
    environment = {**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"exit code {done.returncode} at {lines[-1] if lines else ''}\n{done.stderr[-2000:]}"
    _, answers, _, errors = lines[-1].split()
    assert int(answers) > 300
    assert int(errors) > 300


@pytest.mark.parametrize(
    "name", ["write_index", "write_weight", "value", "beta", "log_decay", "read_index", "read_weight"]
)
def test_a_tensor_of_fewer_tokens_is_refused_by_name(name: str) -> None:
    tokens = random_tokens(1, 8, 1, dtype=torch.float32)
    tokens = tokens._replace(**{name: getattr(tokens, name)[:, :4]})
    with pytest.raises(ValueError, match=r"must be .*got shape"):
        torch.ops.sdm.sparse_delta_rule(*tokens, None, 9, None, False, *PLAN)


def test_backward_of_a_bfloat16_state_is_refused() -> None:
    tokens = random_tokens(1, 8, 1, dtype=torch.float32)
    state, grad = torch.zeros(1, 9, 5, dtype=torch.bfloat16), torch.ones_like(tokens.value)
    with pytest.raises(TypeError, match=r"initial_state must be torch\.float32"):
        torch.ops.sdm.sparse_delta_rule_backward(grad, None, grad, *tokens, state, 9, None, False, True, 192.0)


def test_strided_errors_of_forward_are_read_in_their_order() -> None:
    tokens = random_tokens(2, 8, 1, dtype=torch.float32)
    y, _, error = torch.ops.sdm.sparse_delta_rule(*tokens, None, 9, None, False, *PLAN)
    strided = error.transpose(0, 1).contiguous().transpose(0, 1)
    gradients = [
        torch.ops.sdm.sparse_delta_rule_backward(y, None, e, *tokens, None, 9, None, False, False, 192.0)
        for e in (error, strided)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
