"""Traces, fits, tables, charts and pages: data in, numbers or pictures out.

    trace = sdm.analysis.trace(model, input_ids)      # which earlier tokens each token reads

A name is imported when it is first used: a trace needs transformers, a chart needs matplotlib.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sdm.analysis.counterfactual import forget_tokens, mask_writes
    from sdm.analysis.trace_page import write_trace_page
    from sdm.analysis.tracing import LayerTrace, Trace, trace

_HOMES = {
    "LayerTrace": "tracing",
    "Trace": "tracing",
    "forget_tokens": "counterfactual",
    "mask_writes": "counterfactual",
    "trace": "tracing",
    "write_trace_page": "trace_page",
}

__all__ = ["LayerTrace", "Trace", "forget_tokens", "mask_writes", "trace", "write_trace_page"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"sdm.analysis.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
