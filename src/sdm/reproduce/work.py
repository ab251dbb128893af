"""How long a run takes, compared with others: its tokens times what a token costs."""

from __future__ import annotations

from sdm.data.config import CorpusConfig
from sdm.data.loader import open_data
from sdm.models import cost
from sdm.run.config import TrainConfig

UNKNOWN_VOCABULARY = 1024  # of text that is not tokenised yet
OVERHEAD = 500_000  # FLOPs that could be computed while a token's small matrices are fetched and its loops are run


def work_of(config: TrainConfig) -> float:
    """In FLOPs, as far as they can be known without opening text; what matters is the ratio of two runs."""
    data, steps = config.data, config.schedule.steps
    if isinstance(data, CorpusConfig):
        length, vocabulary = data.sequence_length, config.model.vocab_size or UNKNOWN_VOCABULARY
    else:
        task = open_data(data, "train", steps)
        length, vocabulary = task.sequence_length, task.vocab_size
    per_token = cost(config.model.build(vocabulary)).training_flops_per_token(length) + OVERHEAD
    return float(steps * data.batch_size * length * per_token)
