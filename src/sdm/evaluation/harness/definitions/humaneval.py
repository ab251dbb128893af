"""How an answer to HumanEval is judged: the program with its tests runs well, or not."""

from __future__ import annotations

from typing import Any

from sdm.evaluation.harness.programs import runs_well


def pass_at_1(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Judge an answer: 1 if the program with its tests runs to its end."""
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass_at_1": float(runs_well(program))}
