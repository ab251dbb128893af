"""`sdm info [MODEL]`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sdm import __version__
from sdm.cli.command import Command
from sdm.cli.display import show, show_json
from sdm.errors import UserError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "lm_eval", "vllm")
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "SDM_CACHE")


@dataclass(frozen=True)
class Info(Command):
    """Print the sizes, layers, state and backend of a model; without one, the environment."""

    model: Annotated[Path | None, tyro.conf.Positional] = None
    """A run's folder or a model's folder."""
    context: int = 8192
    """Tokens of context at which costs per token are given."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        """Print the tables."""
        if self.context < 0:
            raise UserError(f"--context must not be negative, got {self.context}")
        if self.model is None:
            if self.json:
                return show_json(dict(environment()))
            for name, value in environment():
                print(f"{name:14} {value}")
            return None
        from sdm import ops
        from sdm.analysis.model_tables import model_costs, model_table
        from sdm.ops.triton.availability import description
        from sdm.run.model import SavedModel

        config = SavedModel(self.model).config()
        if self.json:
            return show_json(model_costs(config, self.context) | {"backends": ops.available_backends()})
        show(model_table(config, self.context))
        print(f"backend: {config.backend}; available here: {', '.join(ops.available_backends())}")
        if "native" not in ops.available_backends():
            print("the compiled core is not installed: CPUs run the slower backend chunked")
        print(f"kernels for GPUs: {description()}")
        return None


def environment() -> list[tuple[str, str]]:
    """Return what a bug report needs: versions, machine, threads, backends and the variables that matter."""
    import torch

    from sdm import ops
    from sdm.ops.triton.availability import description

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f"; load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    native = "native" in ops.available_backends()
    rows = [
        ("sdm", f"{__version__} in {Path(__file__).parents[1]}"),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
    ]
    for package in PACKAGES:
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, "not installed"))
    rows += [
        ("CPU", f"{cores} cores for this process, {torch.backends.cpu.get_cpu_capability()}{load}"),
        ("threads", f"{torch.get_num_threads()} (torch, and the compiled core)"),
        ("backends", ", ".join(ops.available_backends())),
        ("compiled core", "installed" if native else "not installed: CPUs run the slower backend chunked"),
        ("GPU kernels", description()),
    ]
    return rows + [(name, os.environ[name]) for name in VARIABLES if name in os.environ]
