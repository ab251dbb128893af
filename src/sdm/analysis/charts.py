"""Charts of the paper's figures, each built from plain numbers. `sdm.analysis.draw.draw` draws them.

    draw(recall_chart({"SDM": [Point(64, 1.0), Point(256, 0.99)]}, trained_to=256))

Curves are lists of `Point` by the name of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sdm.analysis.draw import architecture
from sdm.analysis.scaling import PowerLaw
from sdm.evaluation.position import POSITION
from sdm.evaluation.report import Chart, Grid, HeatMap, Look, Point, Reference
from sdm.models import SDMConfig, cost, ladder
from sdm.models.layer_types import LAYER_TYPES
from sdm.models.layer_types.base import LayerCost

Curves = Mapping[str, Sequence[Point]]
Metrics = Mapping[str, Sequence[Mapping[str, float]]]
"""By the name of the run, the lines of its metrics (`Run.metrics()`)."""
Series = Mapping[str, Sequence[tuple[float, float]]]
"""By the name of the run or the model, (x, y) pairs."""

CONTEXT = "context (tokens)"
NATS = "nats per token"
ZERO = Reference(0.0)
CONTEXTS = [2**exponent for exponent in range(10, 21)]
LINE_POINTS = 100  # of a fitted line


def position_chart(curves: Curves, name: str = "position", title: str = "Loss by position") -> Chart:
    """Negative log-likelihood against the position in the document."""
    return Chart(name, title, POSITION, _with_interval(NATS, curves), curves, log_x=True)


def gain_chart(curves: Curves, name: str = "context-gain") -> Chart:
    """What the context beyond the reach of the local layers brings, against the position in the document."""
    y = _with_interval("context gain (nats per token)", curves)
    return Chart(name, "Context gain by position", POSITION, y, curves, log_x=True, references=(ZERO,))


def initial_state_chart(learned: Curves, null: Curves) -> Chart:
    """Learned against null initial state by position, for each architecture."""
    curves: dict[str, Sequence[Point]] = {}
    for model in dict.fromkeys((*learned, *null)):
        curves |= {
            f"{model}, {kind} M0": both[model] for kind, both in (("learned", learned), ("null", null)) if model in both
        }
    return position_chart(curves, name="initial-state", title="Learned and null initial state")


def recall_chart(curves: Curves, trained_to: int | None = None) -> Chart:
    """Accuracy of recall, a proportion, against the number of pairs K."""
    references = () if trained_to is None else (Reference(trained_to, f"trained to K = {trained_to}", "x"),)
    y = _with_interval("accuracy of recall", curves)
    x = "pairs to keep apart (K)"
    return Chart("recall", "Recall", x, y, curves, log_x=True, percent=True, references=references)


def state_recall_chart(curves: Curves, pairs: int | None = None, name: str = "recall-state") -> Chart:
    """Accuracy of recall, a proportion, against the size of the state.

    Sizes that several architectures have are marked: there they are compared at equal state.
    """
    kinds: dict[float, set[str]] = {}
    for model, points in curves.items():
        for point in points:
            kinds.setdefault(point.x, set()).add(architecture(model) or model)
    equal = sorted(x for x, models in kinds.items() if len(models) > 1)
    title = "Recall by the size of the state" + ("" if pairs is None else f", K = {pairs}")
    return Chart(
        name,
        title,
        "state (numbers kept behind the context)",
        _with_interval("accuracy of recall", curves),
        curves,
        log_x=True,
        percent=True,
        references=tuple(Reference(x, "equal state", "x") for x in equal),
    )


def cost_chart(time: Curves, memory: Curves) -> Grid:
    """Time (ms), from zero, and memory (MB) of a token against the length of the context, side by side."""
    labels = ("time per generated token (ms)", "state behind the context (MB)")
    charts = [
        Chart("cost-time", "Time", CONTEXT, labels[0], time, log_x=True, y_scale="zero"),
        Chart("cost-memory", "Memory", CONTEXT, labels[1], memory, log_x=True, y_scale="auto"),
    ]
    return Grid("cost", "", charts, width=2, share_y=False)


def slots_chart(curves: Curves, baselines: Mapping[str, Point] | None = None) -> Chart:
    """Loss against the number of slots N; models without slots are level lines."""
    y = _with_interval("nats per token, held out", curves)
    references = tuple(
        Reference(point.y, model, "y", model, point.low, point.high) for model, point in (baselines or {}).items()
    )
    title = "Loss by the number of slots"
    return Chart("memory-size", title, "slots per head (N)", y, curves, log_x=True, references=references)


def write_read_chart(cells: Mapping[tuple[int, int], Point]) -> HeatMap:
    """Loss by the numbers of writes and reads of a token, (W, R)."""
    axes = ("reads per token (R)", "writes per token (W)", "nats per token, held out")
    return HeatMap("writes-and-reads", "Loss by writes and reads", *axes, cells)


def loss_chart(trained: Series, held_out: Series) -> Chart:
    """Loss against the step: of the batches a thin line, of held-out ones a line with markers."""
    curves: dict[str, Sequence[Point]] = {}
    looks: dict[str, Look] = {}
    for model in dict.fromkeys((*trained, *held_out)):
        curves |= {model: _points(trained.get(model, ())), f"{model}, held out": _points(held_out.get(model, ()))}
        looks |= {model: Look(kind="thin"), f"{model}, held out": Look(model)}
    return Chart("training", "Training", "step", NATS, curves, looks=looks)


def utilisation_chart(metrics: Metrics, name: str = "memory") -> Grid:
    """What the memory did during training: gates, how evenly slots are accessed, and how many of them are in use.

    Args:
        metrics: Lines of metrics by run; lines without statistics of a memory are passed over.
        name: Name of the files.

    Raises:
        ValueError: If no line has statistics of a memory.
    """
    series = {run: [line for line in lines if "memory/slots_written" in line] for run, lines in metrics.items()}
    series = {run: lines for run, lines in series.items() if lines}
    if not series:
        raise ValueError("metrics has no line with statistics of a memory: is there an SDM layer in the run?")
    charts = [
        Chart(f"{name}-{gate}", title, "step", "proportion", _gate(series, gate), percent=True)
        for gate, title in (
            ("forget_gate", "Forget gate exp(g): mean, min to max"),
            ("input_gate", "Input gate β: mean, min to max"),
        )
    ]
    for kind, title in (("slots", "Slots {}, of all"), ("entropy", "Entropy of slots {}, of the largest")):
        for side in ("written", "read"):
            curves = {
                run: [Point(line["step"], line[key]) for line in lines if (key := f"memory/{kind}_{side}") in line]
                for run, lines in series.items()
            }
            charts.append(
                Chart(f"{name}-{kind}-{side}", title.format(side), "step", "proportion", curves, percent=True)
            )
    charts = [charts[place] for place in (0, 2, 4, 1, 3, 5)]
    return Grid(name, "", charts, width=3)


def _gate(series: Metrics, gate: str) -> dict[str, list[Point]]:
    keys = [f"memory/{gate}_{end}" for end in ("mean", "min", "max")]
    return {run: [Point(line["step"], *(line[key] for key in keys)) for line in lines] for run, lines in series.items()}


def scaling_chart(
    runs: Series,
    laws: Mapping[str, PowerLaw],
    held_out: Series | None = None,
    y: str = "loss (nats per token)",
) -> Chart:
    """Loss against training compute on logarithmic axes.

    Args:
        runs: (FLOPs, loss) of every run that the laws were fitted to, by architecture.
        laws: The law of each architecture, drawn with the 95% interval of a new level.
        held_out: (FLOPs, loss) of runs that no law has seen, drawn as hollow diamonds.
        y: Label of the losses.
    """
    held_out = held_out or {}
    computes = [x for series in (runs, held_out) for points in series.values() for x, _ in points]
    if not computes:
        raise ValueError("runs must have at least one (FLOPs, loss)")
    line = np.geomspace(min(computes) / 1.3, max(computes) * 1.3, LINE_POINTS)
    curves: dict[str, Sequence[Point]] = {}
    looks: dict[str, Look] = {}
    for model in dict.fromkeys((*runs, *laws, *held_out)):
        if model in laws:
            prediction = laws[model].predict(line)
            ends = zip(line, prediction.value, prediction.low, prediction.high, strict=True)
            label = f"{model}: {laws[model].formula()}"
            curves[label] = [Point(*map(float, values)) for values in ends]
            looks[label] = Look(model, "line")
        curves[model] = _points(runs.get(model, ()))
        looks[model] = Look(kind="points", legend=model not in laws)
        if held_out.get(model):
            curves[f"{model}, held out"] = _points(held_out[model])
            looks[f"{model}, held out"] = Look(model, "hollow")
    return Chart("scaling", "Scaling", "training compute (FLOPs)", y, curves, log_x=True, y_scale="log", looks=looks)


def state_vs_flops(level: int = 8) -> Chart:
    """State size against FLOPs per token of one global layer: the paper's first figure, from our own formulas.

    Attention buys state with context, GDN with wider keys, both in FLOPs; SDM with fewer heads, at the same FLOPs.

    Args:
        level: Level of the paper's ladder.
    """
    config = ladder(level)
    attention = _global_cost(ladder(level, "full_attention"))
    widths = [ladder(level, "gdn").recurrent_key_dim * 2**step for step in range(5)]
    wider = [_global_cost(ladder(level, "gdn", recurrent_key_dim=width)) for width in widths]
    heads = [count for count in (8, 4, 2, 1) if config.hidden_size % (4 * count) == 0]
    memories = [_global_cost(ladder(level, num_memory_heads=count)) for count in heads]
    curves = {
        "full attention, 1k to 1M tokens": [
            Point(attention.flops(context).total, attention.state_elements(context)) for context in CONTEXTS
        ],
        f"GDN, keys of {widths[0]} to {widths[-1]}": [Point(layer.flops(0).total, layer.state) for layer in wider],
        f"SDM, {heads[0]} to {heads[-1]} heads": [Point(layer.flops(0).total, layer.state) for layer in memories],
    }
    title = f"One global layer, level {level} (d = {config.hidden_size})"
    return Chart("state-vs-flops", title, "FLOPs per token", "state (elements)", curves, log_x=True, y_scale="log")


FIGURES = {"state-vs-flops": state_vs_flops}
"""Charts that need no results, by the name that `sdm figure` takes."""


def _global_cost(config: SDMConfig) -> LayerCost:
    return next(layer for layer in cost(config).layers if LAYER_TYPES[layer.kind].scope == "global")


def _points(pairs: Sequence[tuple[float, float]]) -> list[Point]:
    return [Point(x, y) for x, y in pairs]


def _with_interval(label: str, curves: Curves) -> str:
    known = any(point.low is not None for points in curves.values() for point in points)
    return f"{label}, with 95% interval" if known else label
