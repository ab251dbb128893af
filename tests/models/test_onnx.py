"""Export to ONNX takes a backend whose operations ONNX has, and the program computes what the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import assert_close
from tiny_models import tiny_model, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
for _package in ("onnx", "onnxscript"):
    pytest.importorskip(_package, reason="needs the extra onnx")


def export(layers: list[str], ids: torch.Tensor, **fields: Any) -> tuple[torch.nn.Module, Any]:
    model = tiny_model("sdm", global_layer=None, num_hidden_layers=len(layers), layer_types=layers, **fields)
    return model, torch.onnx.export(model, (ids,), kwargs={"use_cache": False}, dynamo=True, verbose=False)


@pytest.mark.parametrize("layers", [["sdm"], ["gdn"], ["pkm"], ["mamba2"], ["sdm", "full_attention"]], ids="-".join)
@torch.no_grad()
def test_the_program_computes_what_the_model_computes(layers: list[str]) -> None:
    import numpy as np
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class GatherElements(OpRun):  # type: ignore[misc]
        """onnx's own refuses a negative axis."""

        def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
            return (np.take_along_axis(data, indices, axis),)

    ids = tokens(2, 4)
    model, program = export(["sliding_attention", *layers], ids)
    (logits,) = ReferenceEvaluator(program.model_proto, new_ops=[GatherElements]).run(None, {"input_ids": ids.numpy()})
    assert_close([torch.from_numpy(logits)], [model(ids, use_cache=False).logits], 1e-5)


def test_a_named_backend_that_onnx_does_not_have() -> None:
    """The error says so, and what to name instead."""
    reason = r'backend "chunked" cannot serve this call: ONNX does not have its operations; use "auto" or "reference"'
    with pytest.raises(torch.onnx.OnnxExporterError, match=reason):
        export(["sdm"], tokens(2, 4), backend="chunked")
