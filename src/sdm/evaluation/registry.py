"""Every measurement by its name, which is what `sdm eval` calls it.

A measurement is one file and one line here. The file holds a frozen dataclass that extends
`sdm.evaluation.measurement.Measurement` (or `sdm.evaluation.documents.TextMeasurement`, which brings --data):

- its **fields** are the settings, and options of the command line: a type, a default and a line of documentation below
  each. The first line of the class's docstring describes the measurement. What cannot work raises a `DataError` or a
  `UserError` in `__post_init__`, naming the field. Settings belong to a result: with others, it is another result.
- `plan(lm)` opens the data for a `sdm.evaluation.eval_model.EvalModel` and returns a `Plan`: the list of `Unit`s, and a
  function from a few units (`Plan.batch` at most, of one `group`) to their results, plain JSON, in order. A unit is
  what is done at once: a document, a sample. Its `key` is unique, and the same for every model that it may be paired
  with; its result depends on nothing but the unit and the model. `Plan.data` is JSON that identifies the data.
- `summary(results)` makes plain JSON of the results of all units, or of those that are done.
- `report(summaries)` says what is shown: tables and charts, for one model or several, as data.
- `pairs(results)` says by which quantities two models are compared, document by document.

The rest is the framework's: progress and remaining time (`Unit.cost`), `--limit` (units of each `group`), resuming,
spreading over ranks, results.json, tables, figures, paired comparisons, exit codes.

    @dataclass(frozen=True)
    class Vowels(Measurement):
        \"\"\"How often the model answers with a vowel.\"\"\"

        prompts: int = 16
        \"\"\"How many prompts.\"\"\"

        def plan(self, lm):
            units = [Unit(f"prompt {i}", payload=i) for i in range(self.prompts)]

            def measure(batch):
                texts = [f"Letter {unit.payload}:" for unit in batch]
                for answer in lm.answer(texts, max_new_tokens=1):
                    yield {"vowel": answer.strip().lower() in tuple("aeiou")}

            return Plan(units, measure, batch=8)

        def summary(self, results):
            return {"share": sum(unit["vowel"] for unit in results.values()) / len(results)}

        def report(self, summaries):
            rows = [(name, f"{summary['share']:.2f}") for name, summary in summaries.items()]
            return Report([Table("Vowels", ("model", "share"), rows)])
"""

from __future__ import annotations

import textwrap

from sdm.errors import UserError, did_you_mean
from sdm.evaluation.harness.measurement import Harness
from sdm.evaluation.induction import Induction
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.nll import Likelihood
from sdm.evaluation.position import Position
from sdm.evaluation.probe import Probe
from sdm.evaluation.recall import Recall
from sdm.evaluation.ruler.measurement import Ruler
from sdm.evaluation.speed import Speed

MEASUREMENTS: dict[str, type[Measurement]] = {
    "nll": Likelihood,
    "position": Position,
    "recall": Recall,
    "harness": Harness,
    "speed": Speed,
    "ruler": Ruler,
    "probe": Probe,
    "induction": Induction,
}


def find(name: str) -> type[Measurement]:
    """Return the measurement of a name, or raise a UserError that offers the nearest names."""
    if name in MEASUREMENTS:
        return MEASUREMENTS[name]
    raise UserError(f"there is no measurement {name!r}; {did_you_mean(name, MEASUREMENTS)}")


def listing() -> str:
    """List the names, each with the first line of its description, in 80 columns."""
    width = max(map(len, MEASUREMENTS)) + 4
    lines: list[str] = []
    for name, kind in MEASUREMENTS.items():
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        heading = f"  {name}".ljust(width)
        lines += textwrap.wrap(
            summary, 80, initial_indent=heading, subsequent_indent=" " * width, break_on_hyphens=False
        )
    return "\n".join(lines)
