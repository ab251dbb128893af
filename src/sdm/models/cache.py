"""The cache that `generate()` and manual decoding use: one layer state per block, and the number of tokens seen.

The layers know what they keep (attention its keys and values, sliding windows only the last ones, recurrent layers one
state of fixed size), so the cache only stores, reorders and counts. With a journal it also takes tokens back.
"""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from sdm.layers.determinism import is_deterministic
from sdm.layers.interface import SequenceLayer
from sdm.layers.state import LayerState, Record, Snapshot, Undo
from sdm.models.configuration import SDMConfig
from sdm.models.journal import BYTES, TOKENS, Journal, JournalMixin, Mark
from sdm.models.layer_types import LAYER_TYPES

if TYPE_CHECKING:
    from sdm.models.state import MemoryState


class LayerCache(CacheLayerMixin):
    """The state of one layer for every row of a batch. The tensors belong to the cache and change in place."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, layer_type: str, place: int = 0) -> None:
        super().__init__()
        self.layer_type, self.place = layer_type, place
        self.journal: Journal | None = None  # shared by the layers of a cache
        self.is_sliding = layer_type == "sliding_attention"
        self.state: LayerState | None = None
        self.begins: Tensor | None = None  # [B], rows whose streams begin anew at the next tokens
        self.length = 0
        self._steps: bool | None = None
        self._layer: weakref.ref[SequenceLayer] | None = None  # the layer that ran last, which replays tokens

    def mix(self, mixer: nn.Module, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Run a layer on x [B,T,hidden_size] behind the tokens seen so far, and remember where it got to."""
        layer = cast(SequenceLayer, mixer)
        if self.state is not None and x.shape[0] != self.batch_size:
            raise ValueError(f"past_key_values holds {self.batch_size} rows, but the input has {x.shape[0]}")
        if self.state is not None and self.begins is not None:
            # Here, where the layer runs: wrapped layers (FSDP) have their weights inside of the forward pass only.
            self.state = self.state.restarted(self.begins, layer.start_state(len(x), learn=True))
            self.begins = None
        if self._steps is None:
            self._steps = can_step(layer)
        self.replay_with(layer)
        run = self._run if self.journal is None else self._run_recorded
        y = run(layer, x, attention_mask)
        self.length += x.shape[1]
        return y

    def _run(
        self, layer: SequenceLayer, x: Tensor, attention_mask: Tensor | None, record: Record | None = None
    ) -> Tensor:
        """Run the layer in place where that is possible, and hand `record` what takes the tokens back."""
        before = self.state
        if is_deterministic() and not torch.is_grad_enabled():
            if attention_mask is not None or not self._steps:
                raise ValueError(
                    "sdm.layers.deterministic() is for rows without padding and layers that run in place; group rows "
                    "of one length, and unwrap the model"
                )
            self.state = (layer.start_state(len(x)) if before is None else before).map(_changeable)
            return layer.extend_(x, self.state, None, record)
        if before is None or not self._steps or torch.is_grad_enabled():
            y, self.state = layer(x, state=before, return_state=True, attention_mask=attention_mask)
            if record is not None and before is not None:
                record(Snapshot(before))
            return y
        if x.shape[1] == 1 and attention_mask is None:
            if not all(_is_changeable(tensor) for tensor in before.tensors().values()):
                self.state = before = before.map(_changeable)
            return layer.step_(x[:, 0], before, record).unsqueeze(1)
        self.state = before.map(_changeable)
        return layer.extend_(x, self.state, attention_mask, record)

    def _run_recorded(self, layer: SequenceLayer, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Run the layer and add to the journal, which takes the last tokens of a long piece only."""
        journal = self.journal
        assert journal is not None
        tokens, outputs = x.shape[1], [x[:, :0]]
        journal.begin(self.place)
        if torch.is_grad_enabled():
            journal.interrupt(self.place)
            return self._run(layer, x, attention_mask)
        early = max(0, tokens - journal.tokens)
        if attention_mask is not None and self.length == 0:
            # A padded prompt: there is nothing to go back to before the last padding.
            early = max(early, _behind_padding(attention_mask))
        if early:
            journal.interrupt(self.place)
            mask = None if attention_mask is None else attention_mask[:, :early]
            outputs.append(self._run(layer, x[:, :early], mask))
            x, tokens = x[:, early:], tokens - early
            attention_mask = None if attention_mask is None else attention_mask[:, early:]
        if self.state is None:
            self.state = layer.start_state(len(x))
        # Columns with padding are calls of their own: what is kept of a call is replayed without a mask.
        for start, end, mask in _without_padding(attention_mask, tokens):

            def record(undo: Undo, tokens: int = end - start) -> None:
                journal.add(self.place, tokens, bool(self._steps), undo)

            outputs.append(self._run(layer, x[:, start:end], mask, record))
        return outputs[-1] if len(outputs) <= 2 else torch.cat(outputs[1:], dim=1)

    def replay_with(self, layer: SequenceLayer) -> None:
        """Name the layer that replays tokens. It is not kept alive."""
        if self._layer is None or self._layer() is not layer:
            self._layer = weakref.ref(layer)

    def take_back(self, undo: Undo, tokens: int, kept: Undo | None = None) -> None:
        """Undo the `tokens` last tokens, and replay those that are kept of the call that `undo` is the record of."""
        assert self.state is not None
        self.state = self.state.map(_changeable)
        undo.restore_(self.state)
        self.length -= tokens
        if kept is None:
            return
        layer = None if self._layer is None else self._layer()
        if layer is None:
            raise RuntimeError("the model that this cache was filled by is gone: only whole calls can be taken back")
        self.state = self.state.map(_changeable)
        layer.replay_(self.state, kept)

    @property
    def is_initialized(self) -> bool:
        """Whether it has seen tokens."""
        return self.state is not None

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """transformers sets it at construction; the state itself is what tells."""

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first tokens."""
        return -1 if self.state is None else self.state.streams

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return 0 if self.state is None else self.state.nbytes

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.length

    def get_max_length(self) -> int:
        """No limit, which transformers writes as -1."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over all tokens, as transformers asks for them."""
        return self.length + query_length, 0

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i continues row beam_idx[i]. Only the rows that change hands are copied."""
        if self.state is not None:
            self.state = self.state.map(lambda x: _reorder(x, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        if self.state is not None:
            self.state = self.state.map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.state is not None:
            self.state = self.state.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take back tokens of a single layer: the layers of a cache rewind together."""
        if tokens_to_remove:
            raise NotImplementedError("call crop() of the cache: its layers take back tokens together")

    def offload(self) -> None:
        """Refuse: states change in place where they are."""
        raise NotImplementedError('cache_implementation="offloaded" is not available for this model')

    def prefetch(self) -> None:
        """Nothing is ever offloaded."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """A state begins with the first tokens that `mix` sees."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Refuse: a block calls `mix`."""
        raise NotImplementedError("this cache is not a store of keys and values; a block calls `mix`")


class SDMCache(JournalMixin, Cache):
    """The states of all layers of a model. `SDMCache(config)` is empty; a model fills it as `past_key_values`.

    Tokens can be taken back from the moment on that `mark`, `record` or transformers' `activate_past_recording` is
    called::

        mark = cache.mark()
        model(ids, past_key_values=cache)
        cache.rewind(mark)        # or cache.crop(-3): as if the last three tokens had never been seen
    """

    layers: list[LayerCache]  # type: ignore[assignment]

    def __init__(self, config: SDMConfig) -> None:
        super().__init__(layers=[LayerCache(kind, place) for place, kind in enumerate(config.layer_types or ())])
        self._sizes = copy.deepcopy(_state_sizes(config))
        self.journal: Journal | None = None
        # The MemoryState that all rows started from, if there was one: a state taken later shares with it.
        self.origin: MemoryState | None = None

    def check(self, config: SDMConfig) -> None:
        """Raise unless the states fit a model of this configuration."""
        for name, size in _state_sizes(config).items():
            if self._sizes[name] != size:
                raise ValueError(
                    f"past_key_values is of another model: its {name} is {self._sizes[name]!r}, expected {size!r}"
                )

    def record(self, tokens: int = TOKENS, nbytes: int = BYTES) -> Journal:
        """Record from now on what it takes to take back the last tokens.

        Args:
            tokens: how many can be taken back at least, if `nbytes` allows it.
            nbytes: bytes that the records may take. A token of an SDM layer takes num_writes rows of its table, or a
                call of many tokens a copy of the table where that is smaller; see docs/rewinding.md.
        """
        if self.journal is None:
            self.use_journal(Journal(len(self.layers), tokens, nbytes))
        else:
            Journal(len(self.layers), tokens, nbytes)  # checks
            self.journal.tokens, self.journal.nbytes_limit = tokens, nbytes
        assert self.journal is not None
        return self.journal

    def activate_past_recording(self) -> None:
        """Record as `record()` does: transformers calls this before assisted decoding."""
        if self.journal is None:
            self.record()

    def mark(self) -> Mark:
        """Name the point of the stream where it is now, for `rewind`. Recording begins if it has not."""
        self.activate_past_recording()
        assert self.journal is not None
        return self.journal.mark(self.get_seq_length())

    def rewind(self, mark: Mark) -> None:
        """Go back to a mark: the states are those of then, bit for bit, and the tokens since were never seen.

        Raises:
            ValueError: the mark is of another cache, of tokens that were taken back since, or out of reach. The states
                are unchanged.
        """
        if not isinstance(mark, Mark):
            raise TypeError(f"mark must come from cache.mark(), got {type(mark).__name__}")
        tokens = None if self.journal is None else self.journal.tokens_since(mark)
        if tokens is None:
            raise ValueError(
                f"cannot rewind to this mark at length {mark.length}: it is of another cache, of tokens that were "
                f"taken back since, or out of reach; this cache can go back {self.rewindable} of its "
                f"{self.get_seq_length()} tokens"
            )
        self._take_back(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens: crop(-n) the last n, crop(n) all but the first n, crop(0) none, as in transformers.

        Whole calls of the model are taken back bit for bit; of a call of which a part is kept, that part is replayed.

        Raises:
            RuntimeError: nothing was recorded, or the states are part of a graph of gradients.
            ValueError: the journal does not reach so far; the message says how far. The states are unchanged.
        """
        length = self.get_seq_length()
        self._take_back(-tokens_to_remove if tokens_to_remove <= 0 else max(0, length - tokens_to_remove))

    @property
    def rewindable(self) -> int:
        """How many tokens can be taken back."""
        return 0 if self.journal is None else self.journal.reach

    def _take_back(self, tokens: int) -> None:
        if tokens == 0:
            return
        if self.journal is None:
            raise RuntimeError(
                f"cannot take back {tokens} tokens: nothing was recorded; call cache.mark(), cache.record() or "
                "cache.activate_past_recording() before the tokens that may be taken back"
            )
        self.journal.check(tokens, self.get_seq_length())
        if any(x.requires_grad for layer in self.layers if layer.state for x in layer.state.tensors().values()):
            raise RuntimeError(
                "cannot take back tokens while gradients are recorded: the states belong to a graph; run the model "
                "under torch.no_grad()"
            )
        self.journal.take_back(tokens, self.layers)

    def use_journal(self, journal: Journal | None) -> None:
        """Let all layers record into this journal; None: record nothing."""
        self.journal = journal
        for layer in self.layers:
            layer.journal = journal

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.origin = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.layers[layer_idx].length

    @property
    def is_initialized(self) -> bool:
        """Whether it has seen tokens."""
        return all(layer.is_initialized for layer in self.layers)

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first tokens."""
        return self.layers[0].batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(layer.nbytes for layer in self.layers)


def _state_sizes(config: SDMConfig) -> dict[str, Any]:
    """The fields that decide about the shapes and the meaning of the states."""
    kinds = [LAYER_TYPES[kind] for kind in dict.fromkeys(config.layer_types or ())]
    names = dict.fromkeys(name for kind in kinds for name in kind.state_fields)
    return {name: getattr(config, name) for name in ("layer_types", "hidden_size", "rope_parameters", *names)}


def can_step(layer: object) -> bool:
    """Whether `step_` may be called past the layer's forward pass. Wrapped layers (peft) have none, and offloaded ones
    (accelerate) have their weights inside of it only."""
    if not isinstance(layer, nn.Module) or not hasattr(layer, "extend_"):
        return False
    return not any(hasattr(module, "_hf_hook") for module in layer.modules())


def _behind_padding(attention_mask: Tensor) -> int:
    """The number of columns up to the last one with padding; 0 if that is the last column of all."""
    padded = (attention_mask == 0).any(0).nonzero()
    behind = int(padded[-1]) + 1 if len(padded) else 0
    return behind if behind < attention_mask.shape[1] else 0


def _without_padding(attention_mask: Tensor | None, tokens: int) -> list[tuple[int, int, Tensor | None]]:
    """Cut columns into runs without padding, and single columns with padding and their mask."""
    if attention_mask is None:
        return [(0, tokens, None)] if tokens else []
    runs: list[tuple[int, int, Tensor | None]] = []
    for column, whole in enumerate((attention_mask != 0).all(0).tolist()):
        if not whole:
            runs.append((column, column + 1, attention_mask[:, column : column + 1]))
        elif runs and runs[-1][2] is None:
            runs[-1] = (runs[-1][0], column + 1, None)
        else:
            runs.append((column, column + 1, None))
    return runs


def _is_changeable(x: Tensor) -> bool:
    """Tensors made under `torch.inference_mode` refuse to change outside of it."""
    return not x.is_inference() or torch.is_inference_mode_enabled()


def _changeable(x: Tensor) -> Tensor:
    return x if _is_changeable(x) else x.clone()


def _reorder(x: Tensor, source: Tensor) -> Tensor:
    if len(source) != len(x):
        return x.index_select(0, source)
    moved = (source != torch.arange(len(x), device=x.device)).nonzero().squeeze(1)
    if len(moved):
        x = _changeable(x)
        x[moved] = x.index_select(0, source[moved])
    return x
