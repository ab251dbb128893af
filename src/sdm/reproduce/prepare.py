"""What many runs share is made once, before several processes would make it at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from sdm.data.config import CorpusConfig
from sdm.data.corpus import open_corpus
from sdm.reproduce.jobs import Job


def prepare_corpora(jobs: Sequence[Job]) -> None:
    """Tokenise the text that jobs train on and are measured on."""
    for config in {job.config.data for job in jobs if isinstance(job.config.data, CorpusConfig)}:
        for split in ("train", "valid", "test"):
            open_corpus(config, split)
