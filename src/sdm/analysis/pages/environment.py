"""The environment of a result: versions, processor, commit. Nothing that names a person or a machine."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from pathlib import Path

import torch

import sdm
from sdm.analysis.pages.page import Section
from sdm.evaluation.report import Table
from sdm.evaluation.results import versions
from sdm.native import core

ROOT = Path(sdm.__file__).parents[2]


def environment_section() -> Section:
    """Make the section of a page that shows the environment."""
    return Section("Environment", tables=(Table("", ("what", "here"), list(environment().items())),))


def environment() -> dict[str, str]:
    """Return what is known of the environment, by name, ready to read."""
    return versions() | {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": _memory(),
        "threads of a process": str(torch.get_num_threads()),
        "instruction set of the C++ core": "the core is not installed" if core is None else core.isa_name(),
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": f"{platform.system()} {platform.machine()}",
        "commit": commit() or "not known: the package was not installed from a checkout",
    }


def commit() -> str:
    """Return the commit of the checkout that the package is in, with a + if its files have changed; else empty."""
    if not (ROOT / ".git").exists():
        return ""
    head = _git("rev-parse", "--short=12", "HEAD")
    return f"{head}+" if head and _git("status", "--short", "--untracked-files=no") else head


def _git(*words: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    if not hasattr(os, "sysconf"):
        return "not known"
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
