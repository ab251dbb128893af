"""How much of what a query of a recall model reads is the value that it asks for, and what if that value is removed?

    python benchmarks/_recall_trace.py runs/quick/recall-sdm-1024-seed0

Needs a run of the recall recipe, so that it is not among the benchmarks that run without arguments.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from torch import Tensor

from sdm.analysis import mask_writes, trace
from sdm.data.config import RecallConfig
from sdm.data.loader import open_data
from sdm.evaluation.eval_model import open_model

BATCHES = 2
EVERY = 8  # of the queries are asked again without a value


def pair_places(ids: Tensor, num_pairs: int) -> dict[int, int]:
    """The place of the value of each key of a row."""
    return {int(key): 2 * number + 1 for number, key in enumerate(ids[: 2 * num_pairs : 2])}


def main() -> None:
    lm = open_model(Path(sys.argv[1]))
    config = None if lm.run is None else lm.run.config()
    if config is None or not isinstance(config.data, RecallConfig):
        raise SystemExit(f"{sys.argv[1]} is not a run of the recall recipe")
    source, pairs = open_data(config.data, "test", config.schedule.steps), config.data.num_pairs
    weights, contributions, first = [], [], []
    asked = changed = kept = 0
    for step in range(BATCHES):
        batch = source.batch(step, range(source.batch_size))
        for number, (ids, targets) in enumerate(zip(batch.input_ids, batch.targets, strict=True)):
            layer, places = trace(lm.model, ids).layers[-1], pair_places(ids, pairs)
            size, contribution = layer.matrix().to_dense().abs(), layer.contributions().to_dense()
            for query in range(2 * pairs, len(ids)):
                place = places[int(ids[query])]
                weights.append(float(size[query, place] / size[query].sum()))
                contributions.append(float(contribution[query, place] / contribution[query].sum()))
                first.append(int(size[query].argmax()) == place)
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
    print(f"{len(weights)} queries, {pairs} pairs, N = {lm.model.config.num_slots}")
    print(f"share of |S| on the value that is asked for: {statistics.mean(weights):.3f}")
    print(f"share of |S| |delta|:                        {statistics.mean(contributions):.3f}")
    print(f"it has the largest |S| of all tokens:        {statistics.mean(first):.1%}")
    print(f"answers that change without it:              {changed} of {asked}")
    print(f"answers that stay without another value:     {kept} of {asked}")


if __name__ == "__main__":
    main()
