"""How an experiment ends: its findings in the terminal, as a page and as JSON; and an exit code that says if all went
well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from sdm.analysis.pages import Finding, Page, write_page
from sdm.analysis.tables import print_fitting, rich_table
from sdm.errors import UserError
from sdm.files import write_json
from sdm.reproduce.jobs import Outcome

VERDICTS = {
    "agrees": "same direction as the paper",
    "differs": "not the paper's direction",
    "unclear": "too close to say",
    "failed": "FAILED",
    "missing": "MISSING",
}


def attempt(make: Callable[[], Finding], key: str, title: str, claim: str, paper: str) -> Finding:
    """A finding; or, where it cannot be made, one that says why, so that the others are shown."""
    try:
        return make()
    except ImportError as error:
        why = f"{error}. Install it, and the same command makes this part."
        return Finding(key, title, claim, "not measured", paper, "missing", why)
    except UserError as error:
        return Finding(key, title, claim, "not measured", paper, "failed", str(error))


def conclude(page: Page, outcomes: Mapping[str, Outcome], folder: Path, console: Console) -> None:
    """Show a page, and write it. Raises, after that, if a run or a finding has failed."""
    said: set[str] = set()
    for finding in page.findings:
        _print(finding, console, said)
    for finding in page.findings:
        console.print(f"{finding.title}: {finding.found} [{VERDICTS[finding.verdict]}]", markup=False, highlight=False)
    write_json(folder / "results.json", _as_json(page, outcomes))
    path = write_page(page, folder)
    console.print(f"{path} has all of this with its figures.", markup=False, highlight=False, soft_wrap=True)
    failed = [name for name, one in outcomes.items() if one.failure is not None]
    failed = failed or [finding.title for finding in page.findings if finding.verdict == "failed"]
    if failed:
        raise UserError(
            f"{len(failed)} of {len(outcomes)} failed: {', '.join(failed)}; {path} has their logs. The same "
            "command tries them again"
        )


def _print(finding: Finding, console: Console, said: set[str]) -> None:
    """Tables, and what is to be known of them that was not `said` before."""
    print_fitting(console, *map(rich_table, finding.tables))

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    for note in finding.notes:
        say(f"  {note}")
    if finding.why:
        say(f"  {finding.title}: {finding.why}")
    deviations = [line for line in finding.deviations if line not in said]
    if deviations:
        say("Not the paper's recipe:")
        for line in deviations:
            say(f"  - {line}")
    said.update(deviations)
    say("")


def _as_json(page: Page, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    fields = ("key", "title", "claim", "found", "paper", "verdict", "why", "notes", "deviations")
    return {
        "findings": [{name: getattr(finding, name) for name in fields} for finding in page.findings],
        "runs": {
            name: {"facts": one.facts, "measured": one.measured, "failure": one.failure}
            for name, one in outcomes.items()
        },
    }
