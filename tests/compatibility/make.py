"""Write one small set of every file format into tests/compatibility/data: `python tests/compatibility/make.py`.

test_formats.py reads the set with the code of today. The files stay as they are for as long as their versions are
supported: run this again only when a format gets a new version, and say so in CHANGELOG.md.

    run/            a run after step 4 of 8: run.json, metrics.jsonl, a checkpoint, an export, results
    stream.sdm      a `MemoryState` with a history
    tokens/         a token store
    tokenizer/      a tokenizer with its checksums
    expected.json   the numbers that reading them must give
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

import sdm
from sdm.data import RecallConfig, TokenStore, train_bpe
from sdm.data.shards import TokenWriter
from sdm.data.tokenization import keep_tokenizer
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.measurement import evaluate
from sdm.evaluation.recall import Recall
from sdm.files import write_json
from sdm.models import SDMCache, SDMForCausalLM
from sdm.models.model_config import ModelConfig
from sdm.run import Run
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, ScheduleConfig, TrainConfig
from sdm.run.model import export_run
from sdm.training import Trainer

DATA = Path(__file__).parent / "data"
CONFIG = TrainConfig(
    model=ModelConfig(
        hidden_size=16,
        num_hidden_layers=5,
        layer_types=("token_shift", "sliding_attention", "sdm", "gdn", "full_attention"),
        intermediate_size=16,
        num_attention_heads=2,
        sliding_window=8,
        num_slots=64,
        num_writes=2,
        num_reads=2,
    ),
    data=RecallConfig(num_pairs=4, start_pairs=2, num_keys=8, num_values=4, batch_size=4),
    schedule=ScheduleConfig(steps=8, warmup=2),
    compute=ComputeConfig(threads=1, device="cpu"),
    checkpoint=CheckpointConfig(every=100),
    monitor=MonitorConfig(log_every=1, memory_every=0, validate_every=0, validation_batches=1, display="none"),
)
STOPPED_AT = 4
MEASUREMENT = Recall(sizes=(2, 4), rows=4)
TEXTS = [f"document {number}: a memory of {64 << number} slots" for number in range(6)]
READ, NEXT = [0, 9, 3, 11, 5, 8, 7, 10, 0, 3], [1, 10, 3, 5]  # tokens before and after the state is saved
HISTORY = 4  # tokens that the state can take back


def logits(model: SDMForCausalLM, tokens: list[int], cache: SDMCache | None = None) -> list[list[float]]:
    """Return the logits of tokens, those of a stream if a cache is given."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None).logits[0].tolist()


def losses(folder: Path) -> list[float]:
    """Return the training loss of each step of a run."""
    return [line["loss"] for line in Run(folder).metrics() if "loss" in line]


def make(folder: Path) -> None:
    """Write the set into an empty folder."""
    with tempfile.TemporaryDirectory() as temporary:
        Trainer(CONFIG, Path(temporary)).run()
        expected: dict[str, object] = {"losses": losses(Path(temporary))}
    run = folder / "run"
    trainer = Trainer(CONFIG, run)
    for _ in range(STOPPED_AT):
        trainer.train_step()
    trainer.save()
    trainer.close()
    export_run(run)
    os.chdir(folder)  # results name the model by the path that it was opened with
    (results,) = evaluate("recall", MEASUREMENT, [(open_model(Path("run")), Path("run/evaluations/recall"))])
    expected["recall"] = {"summary": results.summary, "units": results.units}

    model = SDMForCausalLM.from_pretrained(run / "export").eval()
    cache = SDMCache(model.config)
    cache.record(HISTORY)
    for place in range(0, len(READ), 2):
        logits(model, READ[place : place + 2], cache)
    sdm.MemoryState.from_cache(model, cache, pending=NEXT[:1]).save(folder / "stream.sdm", history=HISTORY)
    expected["logits"] = logits(model, READ + NEXT)

    tokenizer = train_bpe(TEXTS * 4, 270)
    keep_tokenizer(tokenizer, folder / "tokenizer")
    writer = TokenWriter(folder / "tokens", tokenizer, {"name": "texts", "split": "train"})
    writer.write(TEXTS)
    writer.finish()
    store = TokenStore(folder / "tokens")
    expected["documents"] = [store.document(number).tolist() for number in range(store.num_documents)]
    write_json(folder / "expected.json", expected)


if __name__ == "__main__":
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir()
    torch.manual_seed(0)
    make(DATA)
    print(DATA, sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()), "bytes")
