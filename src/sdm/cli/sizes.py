"""Sizes and costs: `sdm info`, `sdm ladder` and `sdm plan`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

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
        from sdm.analysis.tables import model_costs, model_table
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
    from sdm.ranks import usable_cores

    cores = usable_cores()
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


@dataclass(frozen=True)
class Ladder(Command):
    """Print the paper's scaling ladder beside ours."""

    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> None:
        """Print the tables."""
        from sdm.analysis.tables import ladder_rows, ladder_tables

        if self.json:
            return show_json(ladder_rows())
        show(*ladder_tables())
        return None


# Beyond these a plan means nothing: no machine is as large, and sizes no longer fit into 64 bits.
LARGEST = {
    "gpus": 10**6,
    "sequence_length": 2**27,
    "batch_tokens": 2**36,
    "rows": 2**20,
    "shown": 10**6,
}


@dataclass(frozen=True)
class Plan(Command):
    """Estimate memory, traffic and time of training a level of the ladder on GPUs, for every mesh that works."""

    level: int = 13
    """Level of the ladder."""
    global_layer: str = "sdm"
    """Layer type of the global layers, as in the model's configuration."""
    gpus: int = 256
    """Number of GPUs."""
    gpu: Literal["a100", "h100", "h200", "mi300x"] = "h100"
    """Kind of GPU."""
    sequence_length: int = 8192
    """Tokens of a row."""
    batch_tokens: int = 2**21
    """Tokens of a step."""
    rows: int = 1
    """Rows that a rank computes at a time."""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of matrix products and activations."""
    checkpointing: Literal["block", "none"] = "block"
    """What backward recomputes."""
    keep_weights: bool = False
    """Keep the weights of a block from forward to backward, as `compute.mesh.keep_weights` does."""
    shown: int = 8
    """Meshes to show of those that fit, fastest first, and as many of those that do not."""
    json: bool = False
    """Print all meshes as JSON instead of tables."""

    def run(self) -> None:
        """Print the tables."""
        for name, largest in LARGEST.items():
            if not 1 <= getattr(self, name) <= largest:
                raise UserError(
                    f"--{name.replace('_', '-')} must be between 1 and {largest:,}, got {getattr(self, name)}"
                )
        if self.batch_tokens < self.sequence_length:
            raise UserError(
                f"--batch-tokens = {self.batch_tokens} is less than one row of --sequence-length = "
                f"{self.sequence_length}; raise it"
            )
        if self.rows > self.batch_tokens // self.sequence_length:
            raise UserError(
                f"--rows = {self.rows} is more than the {self.batch_tokens // self.sequence_length} rows of a step of "
                f"--batch-tokens = {self.batch_tokens}; lower it"
            )
        from sdm.analysis.tables import plan_rows, plan_tables
        from sdm.plan import mesh_plans
        from sdm.reproduce.recipes.paper import ladder

        config, batch_size = ladder(self.level, self.global_layer), self.batch_tokens // self.sequence_length
        rows: dict[str, Any] = {"sequence_length": self.sequence_length, "batch_size": batch_size}
        config = replace(config, data=replace(config.data, **rows), compute=replace(config.compute, accumulation=1))
        options = {name: getattr(self, name) for name in ("rows", "precision", "checkpointing", "keep_weights")}
        made = list(mesh_plans(config, self.gpus, self.gpu, self.sequence_length, **options))
        if not made:
            raise UserError(
                f"no mesh of {self.gpus} GPUs works for a step of {batch_size} rows of {self.sequence_length} tokens; "
                "take fewer --gpus or more --batch-tokens"
            )
        if self.json:
            show_json(plan_rows(made))
        else:
            show(*plan_tables(made, self.shown))
