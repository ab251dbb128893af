"""RULER's 13 tasks by name (NVIDIA/RULER, scripts/synthetic.yaml), and which of them the averages are of."""

from __future__ import annotations

from collections.abc import Sequence

from sdm.errors import UserError, did_you_mean
from sdm.evaluation.ruler.aggregation import CommonWords, FrequentWords
from sdm.evaluation.ruler.questions import Answering
from sdm.evaluation.ruler.retrieval import Needles, Variables

Task = Needles | Variables | CommonWords | FrequentWords | Answering

TASKS: dict[str, Task] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuid"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuid", value="uuid"),
    "niah_multivalue": Needles("essay", num_values=4),
    "niah_multiquery": Needles("essay", num_keys=4, num_queries=4),
    "vt": Variables(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": Answering("squad"),
    "qa_2": Answering("hotpot"),
}
# The paper reports the mean of all tasks, and in its ablations that of these.
SIX = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_2", "niah_multiquery", "vt")


def check_tasks(names: Sequence[str]) -> None:
    """Raise unless there are such tasks, each named once; the nearest names are offered."""
    if not names:
        raise UserError(f"tasks: name at least one of {', '.join(TASKS)}")
    for number, name in enumerate(names):
        if name not in TASKS:
            raise UserError(f"there is no RULER task {name!r}; {did_you_mean(name, TASKS, 0.4)}")
        if name in names[:number]:
            raise UserError(f"tasks: {name} is named twice")


def text_source(name: str) -> str | None:
    """Which of RULER's texts a task needs: "essays", "squad", "hotpot", or none."""
    match TASKS[name]:
        case Needles(haystack="essay"):
            return "essays"
        case Answering(source=source):
            return source
    return None
