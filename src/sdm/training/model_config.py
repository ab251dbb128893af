"""The model of a run, as fields that a command line can set.

Fields mean what they mean in `sdm.SDMConfig`, which also derives those that are None. They are kept apart from it
because a run's configuration must stay as it was written: a derived size must follow when another one is changed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from sdm.models import SDMConfig
from sdm.training.errors import TrainingError

LayerType = Literal["sliding_attention", "token_shift", "sdm", "gdn", "mamba2", "full_attention"]


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid model. The defaults are the paper's choices at a size for a laptop."""

    vocab_size: int | None = None
    """Tokens in the vocabulary; None: as many as the data has."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_hidden_layers: int = 4
    """Number of blocks."""
    global_layer: LayerType | tuple[LayerType, ...] = "sdm"
    """What every global_layer_interval-th block is; several are taken in turn."""
    global_layer_interval: int = 4
    """Every how many blocks a global layer comes."""
    local_layer: Literal["sliding_attention", "token_shift"] = "sliding_attention"
    """What the other blocks are."""
    layer_types: tuple[LayerType, ...] | None = None
    """The layer of every block, instead of the pattern."""
    intermediate_size: int | None = None
    """Hidden width of the MLP; None: 8/3 of hidden_size, rounded up."""
    intermediate_multiple: int = 64
    """What intermediate_size is rounded up to."""
    num_attention_heads: int | None = None
    """Heads of attention, GDN and Mamba2; None: hidden_size / head_dim."""
    head_dim: int | None = None
    """Channels per head; None: up to 128."""
    num_key_value_heads: int | None = None
    """Key-value heads of full attention; None: half of the heads."""
    sliding_window: int = 128
    """Tokens that sliding-window attention sees."""
    num_memory_heads: int = 1
    """Heads of an SDM layer."""
    num_slots: int | None = None
    """Slots per head, a perfect square; None: (hidden_size / (4 num_memory_heads))^2."""
    num_writes: int | None = None
    """Slots that a token writes, per head; None: 64."""
    num_reads: int | None = None
    """Slots that a token reads, per head; None: 64."""
    learned_initial_state: bool = True
    """Whether SDM starts from a learned memory M0 instead of zeros."""
    initial_state_std: float = 0.002
    """Scale of M0 at initialisation."""
    memory_update: Literal["delta", "slot"] = "delta"
    """The rule of a write."""
    memory_weighting: Literal["softmax", "l2"] = "softmax"
    """How selected scores become weights."""
    memory_temperature: float = 1.0
    """Of that softmax."""
    memory_output_gate: Literal["sigmoid", "silu"] = "sigmoid"
    """Of what is read."""
    decay_per_write: bool = False
    """Weight the decay of each written slot by its share of the write."""
    normalize_scores: bool = False
    """RMS-normalise the scores that address the memory."""
    query_batch_norm: bool = False
    """Batch-normalise the read scores."""
    shift_keys: bool = False
    """Take the keys of SDM and GDN from the token before. An aid for small models, not in the paper."""
    tie_query_initialization: bool = False
    """Start SDM's and GDN's W_q equal to W_k. An aid for small models, not in the paper."""
    recurrent_key_dim: int | None = None
    """Key channels per head of GDN, state channels of Mamba2; None: half of head_dim."""
    short_convolution: int = 4
    """Taps of GDN's and Mamba2's short convolutions; 0 leaves GDN's out."""
    gdn_learned_initial_state: bool = False
    """Whether GDN starts from a learned state instead of zeros."""
    initializer_range: float = 0.02
    """Standard deviation of the weights at initialisation."""
    tie_word_embeddings: bool = False
    """Whether the output projection is the embedding."""
    loss_chunk_size: int = 1024
    """Tokens whose logits are in memory together."""
    backend: str = "auto"
    """Backend of the ops."""

    def __post_init__(self) -> None:
        # Everything but the size of the vocabulary is known, so that a mistake shows before any data is opened.
        self.build(self.vocab_size or 256)

    def build(self, vocab_size: int, eos_token_id: int | None = None) -> SDMConfig:
        """The configuration of a model for data of `vocab_size` tokens."""
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            raise TrainingError(
                f"model.vocab_size = {self.vocab_size} is smaller than the {vocab_size} tokens of the data: the "
                "tokenizer does not match the model; leave model.vocab_size out or take the model's own tokenizer"
            )
        fields = asdict(self) | {"vocab_size": self.vocab_size or vocab_size}
        for name in ("global_layer", "layer_types"):
            if isinstance(fields[name], tuple):
                fields[name] = list(fields[name])
        if fields["layer_types"] is not None:
            fields["global_layer"] = None
        try:
            return SDMConfig(**fields, eos_token_id=eos_token_id, bos_token_id=eos_token_id)
        except ValueError as error:
            raise TrainingError(f"model: {error}") from error
