"""Corpora, tokenizers, packing and synthetic tasks: from text to batches.

source = open_data(CorpusConfig(sources=("code",), tokenizer="bpe:1024"))
for batch in Batches(source):
    ...
"""

from sdm.data.batch import IGNORED, Batch, Batches, BatchSource
from sdm.data.config import CorpusConfig, DataConfig, open_data
from sdm.data.corpus import Corpus, open_corpus
from sdm.data.facts import Facts, FactsConfig
from sdm.data.mad import MAD, MADTaskConfig
from sdm.data.mqar import MQAR, MQARTaskConfig
from sdm.data.needle import Needle, NeedleConfig
from sdm.data.prepare import prepare_tokenizer, prepare_tokens
from sdm.data.rebinding import Rebinding, RebindingConfig
from sdm.data.recall import Recall, RecallConfig, recall_batch
from sdm.data.retrieval import Retrieval, RetrievalConfig
from sdm.data.shards import TokenStore
from sdm.data.sources import Document, Source, open_source, split_documents
from sdm.data.tokenization import ByteTokenizer, HFTokenizer, Tokenizer, load_tokenizer, train_bpe
from sdm.errors import DataError

__all__ = [
    "IGNORED",
    "MAD",
    "MQAR",
    "Batch",
    "BatchSource",
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "CorpusConfig",
    "DataConfig",
    "DataError",
    "Document",
    "Facts",
    "FactsConfig",
    "HFTokenizer",
    "MADTaskConfig",
    "MQARTaskConfig",
    "Needle",
    "NeedleConfig",
    "Rebinding",
    "RebindingConfig",
    "Recall",
    "RecallConfig",
    "Retrieval",
    "RetrievalConfig",
    "Source",
    "TokenStore",
    "Tokenizer",
    "load_tokenizer",
    "open_corpus",
    "open_data",
    "open_source",
    "prepare_tokenizer",
    "prepare_tokens",
    "recall_batch",
    "split_documents",
    "train_bpe",
]
