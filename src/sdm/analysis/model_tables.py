"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from sdm.models import SDMConfig, cost, ladder
from sdm.models.ladder import LEVELS, ONE_LAYER_LESS


def ladder_tables(levels: Sequence[int] = tuple(LEVELS)) -> tuple[Table, Table]:
    """The paper's scaling ladder beside what our formulas give: sizes, and states."""
    sizes = _numbers(
        "Scaling ladder: the paper's numbers beside ours",
        ("level", "d", "layers", "H", "params\npaper", "params\nours", "GFLOPs\n/token"),
    )
    states = _numbers(
        "States, in numbers",
        ("level", "GDN\npaper", "GDN\nours", "SDM\npaper", "SDM\nours", "SDM :\nparams"),
    )
    for level in levels:
        row, sdm, gdn = LEVELS[level], cost(ladder(level)), cost(ladder(level, "gdn"))
        sizes.add_row(
            str(level),
            str(row.hidden_size),
            str(row.num_hidden_layers),
            str(row.num_memory_heads),
            row.paper_parameters,
            f"{sdm.parameters / 1e6:,.1f}M",
            f"{sdm.flops_per_token(8192).total / 1e9:.2f}",
        )
        states.add_row(
            str(level),
            row.paper_gdn_state,
            f"{gdn.state_elements:,}",
            row.paper_sdm_state,
            f"{sdm.state_elements:,}",
            _state_ratio(level),
        )
    sizes.caption = (
        "Parameters include embeddings, but not SDM's memory; FLOPs are those of SDM at 8192 tokens. "
        "Levels 1 and 3: the paper's parameters and its ratio (in brackets) are those of one layer less. "
        "Full attention has a key-value head for two heads, as the paper's; level 8, with 15 heads, has one for three."
    )
    return sizes, states


def _numbers(title: str, names: Sequence[str]) -> Table:
    """An empty table of numbers, none of which is broken into lines."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _state_ratio(level: int) -> str:
    """State to parameters without embeddings; where the paper's number is that of one layer less, with both counts."""
    counts = [LEVELS[level].num_hidden_layers]
    if level in ONE_LAYER_LESS:
        counts.append(counts[0] - 1)
    costs = [cost(ladder(level, num_hidden_layers=count)) for count in counts]
    ratio, *less = (f"{one.state_elements / one.non_embedding_parameters:.0%}" for one in costs)
    return ratio + "".join(f" ({other})" for other in less)


def model_table(config: SDMConfig, context: int = 8192) -> Table:
    """Sizes, layers, state and costs of a model."""
    costs = cost(config)
    flops = costs.flops_per_token(context)
    table = Table(show_header=False)
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
