"""How much of what a query of a recall model reads is the value that it asks for, and what if that value is removed?

    python benchmarks/_recall_trace.py runs/quick/recall-sdm-1024-seed0

A row has K pairs (key token, value token), then queries (key tokens). "Share" has several meanings, and all of them are
printed: of |S|, of S^2, of the contributions |S| |delta|, and of the reading itself, the length of the part that the
value brings along the direction of the reading. Needs a run of the recall recipe, so that it is not among the
benchmarks that run without arguments.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from sdm.analysis import LayerTrace, mask_writes, trace
from sdm.data.config import RecallConfig, open_data
from sdm.evaluation.eval_model import open_model

BATCHES = 2
EVERY = 8  # of the queries are asked again without a value
KINDS = ("its value", "its key", "other values", "other keys", "earlier queries", "the query itself")


def pair_places(ids: Tensor, num_pairs: int) -> dict[int, int]:
    """The place of the value of each key of a row."""
    return {int(key): 2 * number + 1 for number, key in enumerate(ids[: 2 * num_pairs : 2])}


def kinds_of_sources(query: int, place: int, pairs: int) -> Tensor:
    """[query + 1] which of KINDS each token up to a query is."""
    kinds = torch.arange(query + 1).remainder(2).eq(0).long() + KINDS.index("other values")  # keys are even
    kinds[2 * pairs :] = KINDS.index("earlier queries")
    kinds[query], kinds[place], kinds[place - 1] = KINDS.index("the query itself"), 0, 1
    return kinds


def shares(layer: LayerTrace, query: int, kinds: Tensor) -> dict[str, Tensor]:
    """Shares of the kinds of sources in one reading, by definition; of the reading, what is missing to 1 is M0."""
    weight = layer.matrix()[query].to_dense()[: query + 1]
    size = layer.delta_norm[: query + 1, 0].double()
    parts = {
        "|S|": weight.abs(),
        "S^2": weight.square(),
        "|S| |delta|": weight.abs() * size,
        "(S delta)^2": (weight * size).square(),
        "of the reading": layer.reading_shares(query)[: query + 1],
    }
    return {
        name: torch.zeros(len(KINDS), dtype=torch.float64).index_add(0, kinds, part)
        / (1.0 if name == "of the reading" else part.sum())
        for name, part in parts.items()
    }


def main() -> None:
    lm = open_model(Path(sys.argv[1]))
    config = None if lm.run is None else lm.run.config()
    if config is None or not isinstance(config.data, RecallConfig):
        raise SystemExit(f"{sys.argv[1]} is not a run of the recall recipe")
    source, pairs = open_data(config.data, "test", config.schedule.steps), config.data.num_pairs
    by_definition: dict[str, list[Tensor]] = defaultdict(list)
    first, sources, second, of_pairs = [], [], [], []
    asked = changed = kept = 0
    for step in range(BATCHES):
        batch = source.batch(step, range(source.batch_size))
        for number, (ids, targets) in enumerate(zip(batch.input_ids, batch.targets, strict=True)):
            layer, places = trace(lm.model, ids).layers[-1], pair_places(ids, pairs)
            size = layer.matrix().to_dense().abs()
            for query in range(2 * pairs, len(ids)):
                place = places[int(ids[query])]
                for name, share in shares(layer, query, kinds_of_sources(query, place, pairs)).items():
                    by_definition[name].append(share)
                first.append(int(size[query].argmax()) == place)
                sources.append(int((size[query] > 0).sum()))
                rest = size[query].clone()
                rest[place] = 0
                second.append(float(rest.max() / size[query].sum()))
                of_pairs.append(float(size[query, place] / size[query, 1 : 2 * pairs : 2].sum()))
            if step or number:
                continue
            for query in range(2 * pairs, len(ids), EVERY):
                place, answer = places[int(ids[query])], int(targets[query])
                without = mask_writes(lm.model, ids[: query + 1], [place])
                if int(without.before.argmax()) != answer:
                    continue
                other = (place + pairs) % (2 * pairs)
                asked += 1
                changed += int(without.after.argmax()) != answer
                kept += int(mask_writes(lm.model, ids[: query + 1], [other]).after.argmax()) == answer
    heads = layer.num_heads
    print(f"{len(first)} queries, {pairs} pairs, N = {lm.model.config.num_slots}, layer {layer.index}, {heads} head(s)")
    print(f"{'share':16}" + "".join(f"{kind:>18}" for kind in KINDS))
    for name, rows in by_definition.items():
        mean = torch.stack(rows).mean(0)
        print(f"{name:16}" + "".join(f"{share:18.3f}" for share in mean.tolist()))
    print(f"share of |S| among the values of the pairs alone:     {statistics.mean(of_pairs):.3f}")
    print(f"tokens that a query reads, mean:                      {statistics.mean(sources):.0f}")
    print(f"largest share of |S| of another token, mean:          {statistics.mean(second):.3f}")
    print(f"the value has the largest |S| of all tokens:          {statistics.mean(first):.1%}")
    print(f"answers that change without the value:                {changed} of {asked}")
    print(f"answers that stay without another value:              {kept} of {asked}")


if __name__ == "__main__":
    main()
