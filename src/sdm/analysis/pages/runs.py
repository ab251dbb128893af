"""A page about any runs: how they went, what they cost, what was measured of them, and what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sdm.analysis.pages.environment import environment_section
from sdm.analysis.pages.measured import failed, measured_findings
from sdm.analysis.pages.page import Finding, Page, Section
from sdm.analysis.pages.trained import Source, memory_findings, training_finding
from sdm.errors import UserError
from sdm.evaluation.results import FILE, read_results
from sdm.run import Run
from sdm.run.config_file import to_json


def expand(paths: Sequence[Path]) -> list[Path]:
    """Runs and results as they are; for another folder, the runs and results in it."""
    found: list[Path] = []
    for path in paths:
        if _is_source(path):
            found.append(path)
            continue
        inside = sorted(one for one in path.iterdir() if _is_source(one)) if path.is_dir() else []
        if not inside:
            raise UserError(
                f"{str(path)!r} is neither a run's folder nor one of results, nor holds any; `sdm train` makes runs, "
                f"`sdm eval NAME MODEL --output FOLDER` makes results"
            )
        found += inside
    return found


def _is_source(path: Path) -> bool:
    return Run(path).exists() or _is_results(path)


def _is_results(path: Path) -> bool:
    """Others write a results.json too; one that is damaged is ours to say so."""
    file = path / FILE if path.is_dir() else path
    try:
        return file.is_file() and b'"measurement"' in file.read_bytes()
    except OSError:
        return False


def runs_page(named: Sequence[tuple[str, Path]], command: str) -> Page:
    """A page about folders, each under a name; `command` is what makes the page again."""
    sources = [_read(name, path) for name, path in named]
    runs = [one for one in sources if one.run is not None]
    findings: list[Finding] = []
    if runs:
        findings += [training_finding(runs), *memory_findings(runs)]
    findings += measured_findings([result for one in sources for result in one.results])
    findings += _missing(runs)
    findings += [failed(one.name, fault) for one in sources for fault in one.faults]
    names = ", ".join(one.name for one in sources)
    title = f"Report: {names}" if len(names) <= 60 else f"Report of {len(sources)} runs and results"
    sections = [Section("Command", preformatted=command)]
    sections += [
        Section(f"Configuration: {one.name}", preformatted=json.dumps(to_json(one.config), indent=2))
        for one in runs
        if one.config is not None
    ]
    return Page(title, _lead(sources), (*findings,), (*sections, environment_section()))


def _read(name: str, path: Path) -> Source:
    """Everything that can be read. Faults are told, and do not hide the rest."""
    if not Run(path).exists():
        source = Source(name)
        _read_results(source, path)
        return source
    run = Run(path)
    faults: list[str] = []
    config, metrics = None, []
    try:
        config, metrics = run.config(), run.metrics()
    except (OSError, UserError) as error:
        faults.append(str(error))
    source = Source(name, run, config, metrics, faults=faults)
    for folder in sorted(run.evaluations.glob("*")) if run.evaluations.is_dir() else ():
        if (folder / FILE).is_file():
            _read_results(source, folder)
    return source


def _read_results(source: Source, path: Path) -> None:
    try:
        source.results.append((source.name, read_results(path)))
    except (OSError, UserError) as error:
        source.faults.append(str(error))


def _lead(sources: Sequence[Source]) -> str:
    runs = [one for one in sources if one.run is not None]
    names = sorted({result.measurement for one in sources for _, result in one.results})
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}" if runs else "Results"
    done = sum(bool(one.run and one.is_finished()) for one in runs)
    state = f", {done} of them finished" if runs and done < len(runs) else ""
    measured = f"measured: {', '.join(names)}" if names else "nothing has been measured yet"
    return f"{count}{state}; {measured}. Numbers in brackets are 95% intervals over documents."


def _missing(runs: Sequence[Source]) -> list[Finding]:
    """What some runs have been measured by and others have not, or all of them not at all."""
    known = sorted({result.measurement for one in runs for _, result in one.results}) or ["nll"]
    lacking = {
        what: [one for one in runs if what not in {result.measurement for _, result in one.results}] for what in known
    }
    return [
        Finding(
            f"missing-{what}",
            f"Not measured yet: {what}",
            f"{', '.join(one.name for one in found)}: no results of `sdm eval {what}`.",
            "no result",
            "",
            "missing",
            f"`sdm eval {what} {' '.join(str(one.run.folder) for one in found if one.run is not None)}` measures it.",
        )
        for what, found in lacking.items()
        if found
    ]
