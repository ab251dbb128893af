"""Train a small model on a folder of your own text, and let it write."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sdm.models  # noqa: F401, registers the model with transformers
from sdm.data import CorpusConfig
from sdm.models.model_config import ModelConfig
from sdm.run.config import MonitorConfig, OptimConfig, ScheduleConfig, TrainConfig
from sdm.training import Trainer

folder = Path(tempfile.mkdtemp())

# Any folder with .txt, .md, .jsonl or .parquet files will do. This one holds a nursery rhyme, many times over.
texts = folder / "my_text"
texts.mkdir()
rhyme = "The mouse ran up the clock. The clock struck one, the mouse ran down.\n"
for number in range(20):
    (texts / f"{number}.txt").write_text(rhyme * 20)

config = TrainConfig(
    model=ModelConfig(hidden_size=32, num_hidden_layers=4, sliding_window=16, num_slots=64, num_writes=8, num_reads=8),
    data=CorpusConfig(sources=(str(texts),), tokenizer="byte", sequence_length=128, cache_dir=folder / "cache"),
    optim=OptimConfig(lr=1e-2),
    schedule=ScheduleConfig(steps=40, warmup=5),
    monitor=MonitorConfig(log_every=10),
)
run = folder / "run"
Trainer(config, run).run()  # metrics.jsonl, checkpoints and an export for transformers, all in `run`

# A longer run is another run. It may start from the weights of this one.
longer = replace(config, schedule=ScheduleConfig(steps=10, warmup=2), init_from=run)
export = Trainer(longer, folder / "longer").run()

tokenizer = AutoTokenizer.from_pretrained(export)
model = AutoModelForCausalLM.from_pretrained(export).eval()
prompt = tokenizer("The mouse ran", return_tensors="pt")
with torch.inference_mode():
    written = model.generate(**prompt, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(written[0]))
