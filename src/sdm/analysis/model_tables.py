"""Tables of the paper's ladder and of the sizes and costs of a model."""

from __future__ import annotations

from rich.table import Table as RichTable

from sdm.evaluation.report import Table
from sdm.models import SDMConfig, cost, ladder
from sdm.models.ladder import LEVELS, ONE_LAYER_LESS


def ladder_tables() -> tuple[Table, Table]:
    """Make tables of the paper's scaling ladder beside our formulas: sizes, and states."""
    sizes, states = [], []
    for level, row in LEVELS.items():
        sdm, gdn = cost(ladder(level)), cost(ladder(level, "gdn"))
        shape = (level, row.hidden_size, row.num_hidden_layers, row.num_memory_heads)
        gigaflops = sdm.flops_per_token(8192).total / 1e9
        sizes.append((*map(str, shape), row.paper_parameters, f"{sdm.parameters / 1e6:,.1f}M", f"{gigaflops:.2f}"))
        ours = f"{gdn.state_elements:,}", f"{sdm.state_elements:,}"
        states.append((str(level), row.paper_gdn_state, ours[0], row.paper_sdm_state, ours[1], _state_ratio(level)))
    return (
        Table(
            "Scaling ladder: the paper's numbers beside ours",
            ("level", "d", "layers", "H", "params\npaper", "params\nours", "GFLOPs\n/token"),
            sizes,
            "Parameters include embeddings, but not SDM's memory; FLOPs are those of SDM at 8192 tokens. Levels 1 and "
            "3: the paper's parameters and its ratio (in brackets) are those of one layer less. Full attention has a "
            "key-value head for two heads, as the paper's; level 8, with 15 heads, has one for three.",
        ),
        Table(
            "States, in numbers",
            ("level", "GDN\npaper", "GDN\nours", "SDM\npaper", "SDM\nours", "SDM :\nparams"),
            states,
        ),
    )


def ladder_rows() -> list[dict[str, object]]:
    """Return the numbers of `ladder_tables` by level; what the paper prints is its text."""
    rows: list[dict[str, object]] = []
    for level, row in LEVELS.items():
        sdm, gdn = cost(ladder(level)), cost(ladder(level, "gdn"))
        rows.append(
            {
                "level": level,
                "hidden_size": row.hidden_size,
                "layers": row.num_hidden_layers,
                "memory_heads": row.num_memory_heads,
                "parameters": sdm.parameters,
                "non_embedding_parameters": sdm.non_embedding_parameters,
                "flops_per_token": sdm.flops_per_token(8192).total,
                "sdm_state": sdm.state_elements,
                "gdn_state": gdn.state_elements,
                "paper": {
                    "parameters": row.paper_parameters,
                    "sdm_state": row.paper_sdm_state,
                    "gdn_state": row.paper_gdn_state,
                },
            }
        )
    return rows


def model_costs(config: SDMConfig, context: int = 8192) -> dict[str, object]:
    """Return the numbers of `model_table`."""
    costs = cost(config)
    return {
        "parameters": costs.parameters,
        "non_embedding_parameters": costs.non_embedding_parameters,
        "initial_state_parameters": costs.initial_state_parameters,
        "layer_types": list(config.layer_types or []),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "state_elements": costs.state_elements,
        "window_elements": costs.window_elements,
        "kv_elements_per_token": costs.kv_elements_per_token,
        "context": context,
        "flops_per_token": costs.flops_per_token(context).total,
        "bytes_per_token": costs.bytes_per_token(context),
        "backend": config.backend,
    }


def _state_ratio(level: int) -> str:
    """Write state to parameters without embeddings; where the paper counts one layer less, with both counts."""
    counts = [LEVELS[level].num_hidden_layers]
    if level in ONE_LAYER_LESS:
        counts.append(counts[0] - 1)
    costs = [cost(ladder(level, num_hidden_layers=count)) for count in counts]
    ratio, *less = (f"{each.state_elements / each.non_embedding_parameters:.0%}" for each in costs)
    return ratio + "".join(f" ({other})" for other in less)


def model_table(config: SDMConfig, context: int = 8192) -> RichTable:
    """Make a table of sizes, layers, state and costs of a model, FLOPs and traffic behind a context."""
    costs = cost(config)
    flops = costs.flops_per_token(context)
    table = RichTable(show_header=False)
    kinds = config.layer_types or []
    layers = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    for name, value in (
        ("parameters", f"{costs.parameters:,}"),
        ("  without embeddings", f"{costs.non_embedding_parameters:,}"),
        ("  learned initial state", f"{costs.initial_state_parameters:,}"),
        ("layers", layers),
        ("width, vocabulary", f"{config.hidden_size:,}, {config.vocab_size:,}"),
        ("recurrent state", f"{costs.state_elements:,} elements, {_bytes(costs.state_bytes())} in float32"),
        ("sliding windows", f"{costs.window_elements:,} elements"),
        ("keys and values", f"{costs.kv_elements_per_token:,} elements per token"),
        (f"FLOPs per token at {context:,}", f"{flops.total:,}"),
        ("  projections", f"{flops.projections:,}"),
        ("  memory, addressing", f"{flops.memory:,}, {flops.addressing:,}"),
        ("  attention", f"{flops.attention:,}"),
        (f"moved per token at {context:,}", f"{_bytes(costs.bytes_per_token(context))} (bfloat16 weights)"),
    ):
        table.add_row(name, value)
    return table


def _bytes(count: int) -> str:
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.4g} {units[0]}"
