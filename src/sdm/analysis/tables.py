"""Tables in the terminal, and those of the paper's ladder, of a model's sizes and costs, and of training plans.

A table that is too wide is printed in parts, and no number is broken or cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from sdm.evaluation.report import Table
from sdm.models import SDMConfig, cost, ladder
from sdm.models.cost import LEVELS, ONE_LAYER_LESS
from sdm.plan import Plan
from sdm.plan.estimate import MATRIX_SHARE, USABLE, WIRE_SHARE

FIRST = 32  # most characters of the first column, where a table does not fit


def rich_table(table: Table) -> RichTable:
    """Convert a table for the terminal. Numbers are not broken into lines."""
    made = RichTable(title=table.title, caption=table.caption or None, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for place, name in enumerate(table.columns):
        made.add_column(name, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    for row in table.rows:
        made.add_row(*row)
    return made


def print_fitting(console: Console, *parts: RenderableType | Table) -> None:
    """Print tables and lines, one below the other; tables that are too wide in parts."""
    for part in parts:
        shown = rich_table(part) if isinstance(part, Table) else part
        console.print(*(fitting(shown, console) if isinstance(shown, RichTable) else (shown,)))


def fitting(table: RichTable, console: Console) -> list[RenderableType]:
    """Split a table that is wider than the console.

    Returns:
        The table if it fits; else parts, each with the first column and as many others as fit beside it, and the
        caption below them.
    """
    if len(table.columns) < 2 or _width(table, console) <= console.width:
        return [table]
    groups: list[list[int]] = []
    for place in range(1, len(table.columns)):
        if not groups or _width(_part(table, [*groups[-1], place]), console) > console.width:
            groups.append([0])
        groups[-1].append(place)
    parts = [_part(table, places) for places in groups]
    parts[0].title = table.title
    if not isinstance(table.caption, str):
        return [*parts]
    return [*parts, Text(table.caption, style="table.caption")]


def _part(table: RichTable, places: list[int]) -> RichTable:
    """Copy some of the columns."""
    columns = [table.columns[place].copy() for place in places]
    columns[0].max_width = None if columns[0].no_wrap else FIRST
    made = RichTable(*columns, box=table.box, padding=table.padding, title_justify=table.title_justify)
    for row in zip(*(list(table.columns[place].cells) for place in places), strict=True):
        made.add_row(*row)
    return made


def _width(table: RichTable, console: Console) -> int:
    """Return the width that the table takes if no line is broken."""
    return Measurement.get(console, console.options.update(width=1000), table).maximum


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


GIGABYTE = 1e9
_HEADS = {
    "weights": "weights",
    "initial_states": "M0",
    "optimizer": "optim.",
    "gradients": "grads",
    "states": "state",
    "scratch": "temp",
    "activations": "activ.",
}


def plan_tables(plans: Sequence[Plan], shown: int) -> list[Table | str]:
    """Make tables of the meshes that fit, fastest first, and of those that do not, nearest first.

    Args:
        plans: One plan for each mesh.
        shown: Most rows of a table.

    Returns:
        The tables, and a text on what the numbers rest on.
    """
    device, work = plans[0].device, plans[0].work
    fitting = sorted((plan for plan in plans if plan.fits), key=lambda plan: plan.seconds)
    others = sorted((plan for plan in plans if not plan.fits), key=lambda plan: plan.memory.total)
    parts: list[Table | str] = []
    title = f"{work.mesh.size} x {device.name}, {work.batch_size} rows of {work.sequence_length} tokens a step"
    if fitting:
        parts.append(_plan_table(f"{title}: {len(fitting)} of {len(plans)} meshes fit", fitting[:shown]))
    else:
        parts.append(f"{title}: no mesh fits.")
    if others:
        usable = USABLE * device.memory / GIGABYTE
        parts.append(_plan_table(f"{len(others)} do not fit into {usable:.0f} GB", others[:shown], why=True))
    speeds = (
        f"{MATRIX_SHARE:.0%} of {device.flops / 1e12:.0f} TFLOP/s",
        f"{WIRE_SHARE:.0%} of {device.link / 1e9:.0f} GB/s within {device.per_machine} GPUs and "
        f"{device.network / 1e9:.0f} GB/s beyond",
    )
    kernels = f"its kernels on {device.modelled}"
    if not device.name.startswith(device.modelled):
        kernels += f" with {device.bandwidth / 1e12:.2f} TB/s: those of {device.name} are not modelled"
    text = (
        "An estimate. Mesh: data x context x channel. GB on one rank when it has most, which need not be when "
        'the tables of a memory are at work (state, temp): then "all" is without them; sent: GB that a rank hands '
        f"to collectives in a step; s: seconds of a step, with matrix products at {speeds[0]}, the wire at {speeds[1]} "
        f"and SDM at the slow end of a latency model of {kernels}, one after the other."
    )
    if fitting:
        best = fitting[0]
        text += (
            f" The fastest mesh takes {best.least_seconds:.2f} s at the model's fast end; recurrences take "
            f"{best.recurrence.low:.2f}-{best.recurrence.high:.2f} s of it, their bytes alone would take "
            f"{best.recurrence.bandwidth:.2f} s."
        )
    parts.append(text)
    return parts


def plan_rows(plans: Sequence[Plan]) -> list[dict[str, object]]:
    """Return every plan as numbers: bytes of one rank and seconds of a step, fastest first."""
    return [
        {
            "mesh": {"data": plan.work.mesh.data, "context": plan.work.mesh.context, "channel": plan.work.mesh.channel},
            "fits": plan.fits,
            "seconds": plan.seconds,
            "least_seconds": plan.least_seconds,
            "matrix_seconds": plan.matrix_seconds,
            "recurrence_seconds": plan.recurrence.high,
            "least_recurrence_seconds": plan.recurrence.low,
            "recurrence_bandwidth_seconds": plan.recurrence.bandwidth,
            "wire_seconds": plan.wire_seconds,
            "memory": {name: getattr(plan.memory, name) for name in _HEADS} | {"total": plan.memory.total},
            "sent": sum(sum(kinds.values()) for kinds in plan.sent.values()),
        }
        for plan in sorted(plans, key=lambda plan: plan.seconds)
    ]


def _plan_table(title: str, plans: Sequence[Plan], why: bool = False) -> Table:
    rows = []
    for plan in plans:
        mesh, sizes = plan.work.mesh, {name: getattr(plan.memory, name) for name in _HEADS}
        if why:
            last = [_HEADS[max(sizes, key=lambda name: sizes[name])]]
        else:
            sent = sum(sum(kinds.values()) for kinds in plan.sent.values())
            last = [_gigabytes(sent), f"{plan.seconds:.2f}"]
        numbers = (*map(_gigabytes, sizes.values()), _gigabytes(plan.memory.total), *last)
        rows.append((f"{mesh.data}x{mesh.context}x{mesh.channel}", *numbers))
    return Table(title, ("mesh", *_HEADS.values(), "all", *(("largest",) if why else ("sent", "s"))), rows)


def _gigabytes(count: float) -> str:
    size = count / GIGABYTE
    return f"{size:.0f}" if size >= 100 else f"{size:.1f}" if size >= 1 else f"{size:.2f}"
