"""Writes the table of docs/performance.md from the JSON files that the benchmarks leave in benchmarks/results.

python benchmarks/table.py
"""

from __future__ import annotations

import json
from pathlib import Path

from _harness import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- table: made by benchmarks/table.py -->", "<!-- end of table -->"


def rows() -> list[str]:
    lines = ["| question | measured | target | |", "|---|---:|---:|---|"]
    for path in sorted(RESULTS.glob("*.json")):
        for ratio in json.loads(path.read_text())["ratios"]:
            question = ratio["question"].replace("|", "\\|")
            sign = "≥" if ratio["at_least"] else "≤"
            verdict = "met" if ratio["met"] else "**missed**"
            lines.append(f"| {question} | {ratio['value']:.3g} | {sign} {ratio['target']:.3g} | {verdict} |")
    return lines


def machines() -> str:
    seen = set()
    for path in sorted(RESULTS.glob("*.json")):
        here = json.loads(path.read_text())["environment"]
        seen.add(
            f"{here['processor']}, {here['cores']} cores, {here['threads']} threads, "
            f"{here['instruction_set']}, torch {here['torch']}"
        )
    return "; ".join(sorted(seen))


def main() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    table = "\n".join([BEGIN, "", *rows(), "", f"Measured on: {machines()}.", "", END])
    PAGE.write_text(before + table + after)
    print(f"wrote the table of {PAGE.relative_to(PAGE.parent.parent)}")


if __name__ == "__main__":
    main()
