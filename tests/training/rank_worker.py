"""What each process of a test with several ranks does: a list of jobs, in one process group.

    torchrun --nproc-per-node N rank_worker.py JOBS OUTPUT

Every job leaves OUTPUT/NAME-RANK.json, and from the first rank OUTPUT/NAME.safetensors.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from sdm.errors import UserError
from sdm.ranks import leave
from sdm.run.config import TrainConfig
from sdm.run.config_file import from_json
from sdm.training import Trainer, parallel
from sdm.training.train_state import split_state


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks."""
    gathered = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}
    return {name: x.detach().clone() for name, x in gathered.items()}


def perform(config: TrainConfig, folder: Path, action: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What there is to say of a run, and tensors: gradients of its first step, or all that it has loaded."""
    trainer = Trainer(config, folder)
    said: dict[str, Any] = {"rank": trainer.ranks.rank}
    tensors: dict[str, Tensor] = {}
    tables = [x for name, x in trainer.model.named_parameters() if name.endswith("initial_state")]
    said["share"] = [(x.to_local() if isinstance(x, DTensor) else x).numel() / x.numel() for x in tables]
    if action == "load":
        trainer.resume()
        tensors = whole(split_state(trainer.state)[0])
        trainer.close()
        return said, tensors

    def look(*arguments: Any) -> None:
        if not tensors:
            grads = {name: x.grad for name, x in trainer.model.named_parameters() if x.grad is not None}
            tensors.update(whole({name: trainer.parallel.full(name, grad) for name, grad in grads.items()}))

    trainer.optimizer.register_step_pre_hook(look)
    trainer.run()
    return said, tensors


def main(jobs: list[dict[str, Any]], output: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    version = parallel.__version__
    for job in jobs:
        config = job["other"] if rank and "other" in job else job["config"]
        parallel.__version__ = job["version"] if rank and "version" in job else version
        if "places" in job:
            os.chdir(job["places"][rank])
        said: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        try:
            said, tensors = perform(from_json(TrainConfig, config), Path(job["folder"]), job["action"])
        except UserError as error:
            said = {"error": str(error), "kind": type(error).__name__}
        (output / f"{job['name']}-{rank}.json").write_text(json.dumps(said))
        if rank == 0:
            save_file(tensors, output / f"{job['name']}.safetensors")
    leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
