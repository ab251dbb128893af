"""`sdm eval mqar`: accuracy of multi-query associative recall as it was published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdm.data.errors import check_positive
from sdm.data.mqar import MQAR
from sdm.data.published_config import MQARTaskConfig
from sdm.errors import UserError
from sdm.evaluation.measurement import Measurement, Plan, Result, Unit
from sdm.evaluation.recall import ROWS, accuracy_report, count_right
from sdm.evaluation.report import Report
from sdm.evaluation.subject import Subject


@dataclass(frozen=True)
class PublishedRecall(Measurement):
    """Accuracy of a run that was trained on MQAR, at the numbers of pairs of its test segments."""

    rows: int = 1000
    """Rows of each test segment."""

    def __post_init__(self) -> None:
        check_positive(rows=self.rows)

    def plan(self, subject: Subject) -> Plan:
        config = None if subject.run is None else subject.run.config().data
        if not isinstance(config, MQARTaskConfig):
            raise UserError(f"mqar: {subject.name} is no run that was trained on MQAR")
        task, segments = config, config.test_segments
        units = [
            Unit(f"segment {number}, {pairs} pairs", payload=(number, pairs))
            for number, (_, pairs) in enumerate(segments)
        ]

        def measure(batch: Sequence[Unit]) -> Iterator[Result]:
            for unit in batch:
                segment, pairs = unit.payload
                yield {"pairs": pairs, "accuracy": segment_accuracy(subject.model, task, segment, self.rows)}

        return Plan(units, measure, {"vocab_size": config.vocab_size, "test_segments": [list(x) for x in segments]})

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        return {"accuracy": {str(one["pairs"]): one["accuracy"] for one in results.values()}}

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        return accuracy_report("MQAR", summaries)


def mqar_accuracy(model: Any, config: MQARTaskConfig, rows: int = 1000) -> dict[int, float]:
    """For each test segment of the published task, its number of pairs and the accuracy on so many rows."""
    segments = enumerate(config.test_segments)
    return {pairs: segment_accuracy(model, config, number, rows) for number, (_, pairs) in segments}


def segment_accuracy(model: Any, config: MQARTaskConfig, segment: int, rows: int) -> float:
    source, pairs = MQAR(config, "test"), config.test_segments[segment][1]
    right = 0
    for start in range(0, rows, ROWS):
        right += count_right(model, source.batch(segment, range(start, min(start + ROWS, rows))))
    return right / (rows * pairs)
