"""What wrong answers to RULER's multikey_2 are made of: other needles' numbers, or a walk from one needle to another?

    python benchmarks/_needle_errors.py runs/ruler/longer-sdm-*

The tokenizer of `sdm train retrieval` cuts a number of seven digits into groups. A model that finds the next group by
the group before it, and by nothing else, leaves the needle wherever another one holds the same group. So a wrong answer
that begins with the right groups is a *walk* if its first wrong group follows the same group in another needle of the
context; "by chance" is the share of all groups that do. Needs runs of `sdm reproduce ruler`, so that it is not among
the benchmarks that run without arguments.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from sdm.data import RetrievalConfig
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.results import read_results
from sdm.evaluation.ruler.measurement import Ruler
from sdm.run import Run
from sdm.run.config_file import from_json

TASK = "niah_multikey_2"
NUMBER, ANSWER = re.compile(r"\b\d{7}\b"), re.compile(r"is: ?(\d+)")
LENGTH = 7  # digits of a number


def kind_of_error(output: str, answer: str, numbers: Sequence[str], digits: int) -> tuple[str, float]:
    """What a wrong answer is, and for walks how likely it would be one by chance.

    Args:
        output: What the model generated.
        answer: The right number.
        numbers: Of all needles.
        digits: Of a group.
    """
    if (match := ANSWER.search(output)) is None:
        return "no number", 0.0
    given = match[1]
    if given in numbers:
        return "another needle's number", 0.0

    def group(number: str, place: int) -> str:
        return number[place : place + digits]

    *places, last = range(0, LENGTH, digits)
    right = next((place for place in places if group(given, place) != group(answer, place)), last)
    if right == 0:
        begins = any(number.startswith(group(given, 0)) for number in numbers)
        return "begins as another needle's number" if begins else "begins with other digits", 0.0
    before = group(answer, right - digits)
    others = [number for number in numbers if number != answer]
    followers = {
        group(number, place + digits) for number in others for place in places if group(number, place) == before
    }
    walked = group(given, right) in followers
    chance = len(followers) / 10 ** len(group(answer, right))
    return "begins right, walks to another needle" if walked else "begins right, other", chance


def main() -> None:
    """Print a table of the runs together, by the length of the context."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--measurement", default="ruler-dense", help="folder in evaluations/ of each run")
    arguments = parser.parse_args()
    kinds: dict[int, Counter[str]] = defaultdict(Counter)
    chance: dict[int, list[float]] = defaultdict(list)
    for folder in arguments.runs:
        results = read_results(Run(folder).evaluations / arguments.measurement)
        data = Run(folder).config().data
        assert isinstance(data, RetrievalConfig), f"{folder} is not a run of `sdm train retrieval`"
        generator = from_json(Ruler, results.settings, "settings").generator(open_model(folder).tokenizer)
        for unit in results.units.values():
            if unit["task"] != TASK:
                continue
            length = unit["length"]
            if unit["score"] == 1:
                kinds[length]["right"] += 1
                continue
            numbers = NUMBER.findall(generator.sample(TASK, length, unit["index"]).prompt)
            kind, share = kind_of_error(unit["output"], unit["answers"][0], numbers, data.digits)
            kinds[length][kind] += 1
            if kind.startswith("begins right"):
                chance[length].append(share)
    for length, counts in sorted(kinds.items()):
        total = sum(counts.values())
        print(f"{length:,} tokens, {total} answers of {len(arguments.runs)} runs")
        for kind, count in counts.most_common():
            print(f"  {count:5d}  {count / total:6.1%}  {kind}")
        if likely := chance[length]:
            print(f"         by chance {sum(likely) / len(likely):.1%} of those that begin right would walk")


if __name__ == "__main__":
    main()
