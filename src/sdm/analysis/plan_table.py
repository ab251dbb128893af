"""Plans of distributed training as tables."""

from __future__ import annotations

from collections.abc import Sequence

from sdm.evaluation.report import Table
from sdm.plan import Plan
from sdm.plan.workload import MATRIX_SHARE, MEMORY_SHARE, USABLE, WIRE_SHARE

GIGABYTE = 1e9
_HEADS = {
    "weights": "weights",
    "initial_states": "M0",
    "optimizer": "optim.",
    "gradients": "grads",
    "states": "state",
    "saved_rows": "rows",
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
        parts.append(_table(f"{title}: {len(fitting)} of {len(plans)} meshes fit", fitting[:shown]))
    else:
        parts.append(f"{title}: no mesh fits.")
    if others:
        usable = USABLE * device.memory / GIGABYTE
        parts.append(_table(f"{len(others)} do not fit into {usable:.0f} GB", others[:shown], why=True))
    speeds = (
        f"{MATRIX_SHARE:.0%} of {device.flops / 1e12:.0f} TFLOP/s",
        f"{MEMORY_SHARE:.0%} of {device.bandwidth / 1e12:.2f} TB/s",
        f"{WIRE_SHARE:.0%} of {device.link / 1e9:.0f} GB/s within {device.per_machine} GPUs and "
        f"{device.network / 1e9:.0f} GB/s beyond",
    )
    parts.append(
        "An estimate. Mesh: data x context x channel. GB on one rank when it has most, which need not be when "
        'the tables of a memory are at work (state, rows): then "all" is without them; sent: GB that a rank hands to '
        f"collectives in a step; s: seconds of a step, with matrix products at {speeds[0]}, rows of the memories at "
        f"{speeds[1]} and the wire at {speeds[2]}, one after the other."
    )
    return parts


def plan_rows(plans: Sequence[Plan]) -> list[dict[str, object]]:
    """Return every plan as numbers: bytes of one rank and seconds of a step, fastest first."""
    return [
        {
            "mesh": {"data": plan.work.mesh.data, "context": plan.work.mesh.context, "channel": plan.work.mesh.channel},
            "fits": plan.fits,
            "seconds": plan.seconds,
            "matrix_seconds": plan.matrix_seconds,
            "memory_seconds": plan.memory_seconds,
            "wire_seconds": plan.wire_seconds,
            "memory": {name: getattr(plan.memory, name) for name in _HEADS} | {"total": plan.memory.total},
            "sent": sum(sum(kinds.values()) for kinds in plan.sent.values()),
        }
        for plan in sorted(plans, key=lambda plan: plan.seconds)
    ]


def _table(title: str, plans: Sequence[Plan], why: bool = False) -> Table:
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
