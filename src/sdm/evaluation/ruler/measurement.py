"""`sdm eval ruler`: accuracy on RULER's tasks by the length of the context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sdm.data.tokenization import Tokenizer
from sdm.errors import UserError, check_size
from sdm.evaluation.measurement import Measurement, Pairs, Plan, Result, Unit
from sdm.evaluation.report import Report
from sdm.evaluation.ruler.generator import BUILT_IN, Generator, Sources, counter
from sdm.evaluation.ruler.scoring import score
from sdm.evaluation.ruler.summary import pairs, report, summarise
from sdm.evaluation.ruler.tasks import TASKS, check_tasks, text_source
from sdm.evaluation.subject import Subject

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)  # as published


@dataclass(frozen=True)
class Ruler(Measurement):
    """RULER: retrieval, tracing, counting and answering in contexts of a chosen length, by 13 synthetic tasks."""

    free: ClassVar[tuple[str, ...]] = ("batch_size",)

    tasks: tuple[str, ...] = tuple(TASKS)
    """Which of the 13 tasks."""
    lengths: tuple[int, ...] = LENGTHS
    """Tokens of prompt and answer together; prompts fill them to 1%."""
    samples: int = 500
    """Of each task at each length."""
    seed: int = 42
    """Of the samples."""
    essays: str = Sources.essays
    """The text that needles are hidden in: files of the user's, such as RULER's PaulGrahamEssays.json, or a built-in
    corpus (text, code), which is not comparable with published results."""
    squad: Path | None = None
    """SQuAD 2.0's development set for qa_1. Without it, questions are made from templates, which is not comparable."""
    hotpot: Path | None = None
    """HotpotQA's development set, distractor setting, for qa_2. Without it, as above."""
    skip_short: bool = False
    """Leave out lengths that a task does not fit into, instead of refusing."""
    batch_size: int = 8
    """Prompts that are answered side by side. Answers do not depend on it."""

    def __post_init__(self) -> None:
        check_tasks(self.tasks)
        check_size(samples=self.samples, batch_size=self.batch_size)
        if not self.lengths or len(set(self.lengths)) < len(self.lengths) or min(self.lengths) < 1:
            raise UserError(f"lengths: name at least one, each once, got {' '.join(map(str, self.lengths))}")

    def generator(self, tokenizer: Tokenizer) -> Generator:
        return Generator(counter(tokenizer), self.seed, Sources(self.essays, self.squad, self.hotpot))

    def plan(self, subject: Subject) -> Plan:
        subject.check_length(max(self.lengths), "leave out longer --lengths")
        generator = self.generator(subject.tokenizer)
        units = [
            Unit(f"{task} {length} {index}", f"{task} {length}", (task, length, index), cost=length)
            for task, length in self.held(generator)
            for index in range(self.samples)
        ]

        def measure(batch: Sequence[Unit]) -> Iterator[Result]:
            samples = [generator.sample(*unit.payload) for unit in batch]
            outputs = subject.answer([sample.prompt for sample in samples], samples[0].new_tokens)
            for sample, output in zip(samples, outputs, strict=True):
                yield {
                    "task": sample.task,
                    "length": sample.length,
                    "index": sample.index,
                    "tokens": sample.prompt_tokens,
                    "answers": list(sample.answers),
                    "output": output,
                    "score": score(TASKS[sample.task].metric, output, sample.answers),
                }

        return Plan(units, measure, generator.manifest(self.tasks), batch=self.batch_size)

    def held(self, generator: Generator) -> list[tuple[str, int]]:
        """The tasks and the lengths that hold them, shorter ones first."""
        held: list[tuple[str, int]] = []
        refused: dict[int, list[str]] = {}
        for length in sorted(self.lengths):
            for task in self.tasks:
                smallest = generator.smallest_length(task, length, self.samples)
                if smallest <= length:
                    held.append((task, length))
                else:
                    refused.setdefault(length, []).append(f"{task} (takes {smallest})")
        if refused and not (held and self.skip_short):
            lines = [f"{length} tokens do not hold {', '.join(tasks)}" for length, tasks in refused.items()]
            raise UserError(
                f"{'; '.join(lines)}. Leave out the tasks or the lengths, or leave out such pairs with --skip-short"
            )
        return held

    def comparable(self, task: str) -> bool:
        """Whether the task's text is what the user says is RULER's own; some tasks need none."""
        match text_source(task):
            case "essays":
                return self.essays not in BUILT_IN
            case "squad":
                return self.squad is not None
            case "hotpot":
                return self.hotpot is not None
        return True

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        return summarise(results, {task: self.comparable(task) for task in self.tasks})

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        return report(summaries)

    def pairs(self, results: Mapping[str, Result]) -> Pairs:
        return pairs(results)
