"""How Python calls the compiled core: by the names of fields, and only a core of the same sources."""

from __future__ import annotations

import runpy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import sdm.native
from helpers import random_tokens
from sdm.native import core
from sdm.ops import available_backends, sparse_delta_rule

pytestmark = pytest.mark.skipif("native" not in available_backends(), reason="the compiled core is missing")


def topk_fields() -> dict[str, Any]:
    return {"threads": 1, "rows": 0, "n": 4, "k": 2, "scores": None, "values": None, "index": None}


def test_fields_come_in_any_order() -> None:
    assert core is not None
    fields = topk_fields()
    assert core.product_key_topk(False, **dict(reversed(fields.items()))) is None
    # Names that are equal but not the same object.
    assert core.product_key_topk(False, **{"".join(name): x for name, x in fields.items()}) is None


def test_a_field_is_missing() -> None:
    assert core is not None
    fields = topk_fields()
    del fields["k"]
    with pytest.raises(TypeError, match="product_key_topk needs the argument k"):
        core.product_key_topk(False, **fields)


def test_a_field_is_unknown() -> None:
    assert core is not None
    with pytest.raises(TypeError, match="product_key_topk has no argument temperature"):
        core.product_key_topk(False, **topk_fields(), temperature=1)
    with pytest.raises(TypeError, match="one argument without a name"):
        core.product_key_topk(**topk_fields())


def test_a_core_of_other_sources_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sdm.native._core", ModuleType("sdm.native._core"))
    with pytest.warns(RuntimeWarning, match="built from older or newer sources"):
        fresh = runpy.run_path(str(sdm.native.__file__))
    assert fresh["core"] is None
    with pytest.raises(RuntimeError, match="install it again"):
        fresh["require_core"]()


@pytest.mark.parametrize("with_state", [False, True])
def test_few_visits_to_many_slots(with_state: bool) -> None:
    """They are numbered without a pass over all slots, to the same effect."""
    few, many = 12, 2**14 if with_state else 2**28
    tokens = random_tokens(1, 3, 1, W=4, R=5, N=few, D=24, dtype=torch.float32)
    places = torch.randint(0, many // few, (few,)) + torch.arange(few) * (many // few)
    scattered = tokens._replace(write_index=places[tokens.write_index], read_index=places[tokens.read_index])
    small, large = None, None
    if with_state:
        small, large = torch.randn(1, few, 24), torch.zeros(1, many, 24)
        large[:, places] = small
    results = []
    for inputs, state, slots in ((tokens, small, few), (scattered, large, many)):
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        start = None if state is None else state.requires_grad_()
        y, _ = sparse_delta_rule(*leaves, initial_state=start, num_slots=slots, backend="native")
        asked = [x for x in (*leaves, start) if x is not None and x.requires_grad]
        *grads, last = torch.autograd.grad(y.sin().sum(), asked)
        if slots == many and with_state:
            assert last.count_nonzero() == last[:, places].count_nonzero()
            last = last[:, places]
        results.append([y, *grads, last])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
