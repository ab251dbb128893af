"""RULER's metrics: whether answers are part of what was generated, in upper or lower case."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNPRINTABLE = re.compile(r"[\x00-\x1f]")


def score(metric: str, output: str, answers: Sequence[str]) -> float:
    """all: the share of the answers that are found; part: 1 if any is."""
    text = _UNPRINTABLE.sub("\n", output).strip().lower()
    found = [answer.lower() in text for answer in answers]
    return float(any(found)) if metric == "part" else sum(found) / len(found)
