"""`sdm info MODEL`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sdm.cli.command import Command
from sdm.cli.display import show
from sdm.errors import UserError


@dataclass(frozen=True)
class Info(Command):
    """Print the sizes, layers, state and backend of a model."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run's folder or a model's folder."""
    context: int = 8192
    """Tokens of context at which costs per token are given."""

    def run(self) -> None:
        from sdm import ops
        from sdm.analysis.model_tables import model_table
        from sdm.ops.triton.availability import description
        from sdm.run.model import SavedModel

        if self.context < 0:
            raise UserError(f"--context must not be negative, got {self.context}")
        config = SavedModel(self.model).config()
        show(model_table(config, self.context))
        print(f"backend: {config.backend}; available here: {', '.join(ops.available_backends())}")
        if "native" not in ops.available_backends():
            print("the compiled core is not installed: CPUs run the slower backend chunked")
        print(f"kernels for GPUs: {description()}")
