"""Sequences split over ranks: each rank has a slice of time, all of equal length.

Norms, MLPs, embeddings and the loss work token by token and need no communication. A local layer receives the few
tokens before its slice from the rank before. A recurrent layer turns slices of time into slices of channels (SDM) or
heads (GDN, DeltaNet, KDA, Mamba2, Raven) by an all-to-all, runs over the whole sequence, and turns back: no rank
waits for the state of another. Full attention gathers keys and values.

Shapes: B batch, T time of the whole sequence, P ranks, H heads, D value channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.layers import (
    FullAttention,
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba2,
    ProductKeyMemory,
    Raven,
    ShiftedKeys,
    SlidingWindowAttention,
    SparseDeltaMemory,
    TokenShift,
)
from sdm.layers.full_attention import attend_blocks
from sdm.layers.interface import Streams, documents_of, streams_of
from sdm.layers.recurrent_layer import RecurrentLayer
from sdm.models.likelihood import IGNORED
from sdm.parallel.channels import SplitMemory
from sdm.parallel.collectives import Group, all_to_all, gather_time, tokens_before


@dataclass(frozen=True)
class TimeSlice:
    """A rank's slice of rows of T tokens."""

    input_ids: Tensor  # [B,T/P]
    targets: Tensor  # [B,T/P]
    cu_seqlens: Tensor | None  # of the whole row: every rank knows all documents

    @staticmethod
    def of(input_ids: Tensor, targets: Tensor, cu_seqlens: Tensor | None, rank: int, ranks: int) -> TimeSlice:
        """Return the slice of a rank. Rows whose length the ranks do not divide are padded at their end."""
        missing = -input_ids.shape[1] % ranks
        if missing:
            input_ids, targets = F.pad(input_ids, (0, missing)), F.pad(targets, (0, missing), value=IGNORED)
            if cu_seqlens is not None:  # a document of their own
                cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:] + missing))
        ids, wanted = (x.chunk(ranks, dim=1)[rank] if x.shape[1] else x for x in (input_ids, targets))
        return TimeSlice(ids, wanted, cu_seqlens)


def check_context(model: nn.Module, ranks: int, channel: int = 1) -> None:
    """Raise a ValueError unless every layer of the model can split sequences over so many ranks, with its memories
    split over `channel` ranks."""
    for name, layer in _mixers(model):
        if _kind(layer) is None:
            known = ", ".join(sorted(kind.__name__ for kind in _SPLIT))
            raise ValueError(f"context: {name} is a {type(layer).__name__}; sequences can be split in {known}")
        inner = layer.layer if isinstance(layer, ShiftedKeys) else layer
        if isinstance(inner, SparseDeltaMemory):
            sizes, what = inner.head_dim // channel, "value channels that a rank has of a memory's head"
        elif isinstance(inner, RecurrentLayer):
            sizes, what = inner.num_heads, "heads of a recurrent layer"
        else:
            continue
        if sizes % ranks:
            fitting = ", ".join(str(count) for count in range(1, sizes + 1) if sizes % count == 0)
            raise ValueError(f"context = {ranks} must divide the {sizes} {what} ({name}): take one of {fitting}")


def split_time(model: nn.Module, group: Group) -> None:
    """Make the layers of a model work on slices of time, one per rank of the group, in place.

    The model then takes a `TimeSlice`, carries no states and takes no padding. Each rank's loss and gradients are those
    of its own targets; their sums over the group are those of the whole sequence.
    """
    check_context(model, dist.get_world_size(group))
    for _, layer in _mixers(model):
        kind = _kind(layer)
        assert kind is not None
        _SPLIT[kind](layer, group)


def _mixers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    mixers = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] == "mixer"]
    return mixers or [("layer", model)]


def _kind(layer: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in _SPLIT if isinstance(layer, kind)), None)


class _OnSlices(nn.Module):
    """Base of the layers that work on slices of time."""

    context_group: Group

    def _before(self, x: Tensor, count: int) -> Tensor:
        """x [B,T/P,C] behind the last `count` tokens before it."""
        return torch.cat((tokens_before(x, self.context_group, count), x), dim=1)

    def _span(self, x: Tensor, own: Tensor) -> tuple[int, int]:
        """Where `x`, which is this rank's slice `own` and some tokens before it, begins and ends in the sequence."""
        end = (dist.get_rank(self.context_group) + 1) * own.shape[1]
        return end - x.shape[1], end

    def _documents(self, x: Tensor, own: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
        """The offsets of the documents, or their parts, in `x`."""
        if cu_seqlens is None:
            return None
        start, end = self._span(x, own)
        return (cu_seqlens.clamp(start, end) - start).unique_consecutive()

    def _positions(self, x: Tensor, own: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The place of each token of `x` within its row or document, [1,...]."""
        start, end = self._span(x, own)
        place = torch.arange(start, end, device=x.device)
        if cu_seqlens is not None:
            place = place - cu_seqlens.to(place.dtype)[documents_of(cu_seqlens, end)[start:]]
        return place.unsqueeze(0)


def _refuse(state: object = None, return_state: object = False, attention_mask: object = None) -> None:
    if state is not None or return_state:
        raise ValueError("state: sequences split over ranks carry no states on; set context to 1")
    if attention_mask is not None:
        raise ValueError("attention_mask: sequences split over ranks take no padding; set context to 1, or pack them")


class SlicedWindow(_OnSlices, SlidingWindowAttention):
    """Sliding-window attention on a slice of time."""

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, **others: object) -> Tensor:  # type: ignore[override]
        """Return this rank's slice of the output, given its slice of the input."""
        _refuse(**others)
        behind = self._before(x, self.window - 1)
        # The positions are those of the whole sequence: they also say which documents the tokens are of.
        position = self._positions(behind, x, cu_seqlens)
        projected = self._project(behind, position)
        mixed, _ = self._attend(*projected, position, None, Streams(len(x)), False)
        return self._output(x, mixed[:, behind.shape[1] - x.shape[1] :])


class SlicedShift(_OnSlices, TokenShift):
    """A token shift on a slice of time."""

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, **others: object) -> Tensor:  # type: ignore[override]
        """Return this rank's slice of the output, given its slice of the input."""
        _refuse(**others)
        behind = self._before(x, 1)
        y = TokenShift.forward(self, behind, cu_seqlens=self._documents(behind, x, cu_seqlens))
        assert isinstance(y, Tensor)
        return y[:, y.shape[1] - x.shape[1] :]


class SlicedShiftedKeys(_OnSlices, ShiftedKeys):
    """A layer with shifted keys on a slice of time."""

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, **others: object) -> Tensor:  # type: ignore[override]
        """Return this rank's slice of the output, given its slice of the input."""
        _refuse(**others)
        behind = self._before(x, self.history)
        streams = streams_of(behind, None, self._documents(behind, x, cu_seqlens))
        shifted = self.key_input(behind, None, streams)[0][:, behind.shape[1] - x.shape[1] :]
        return self.layer(x, cu_seqlens=cu_seqlens, key_input=shifted)


class SlicedRecurrent(_OnSlices, RecurrentLayer):
    """A layer with a small state per head on a slice of time, by heads."""

    def forward(  # type: ignore[override]
        self, x: Tensor, cu_seqlens: Tensor | None = None, key_input: Tensor | None = None, **others: object
    ) -> Tensor:
        """Return this rank's slice of the output, given its slice of the input."""
        _refuse(**others)
        history = self.conv.kernel_size - 1 if self.conv is not None else 0
        behind = self._before(x, history)
        mixed = self._project(behind, None if key_input is None else self._before(key_input, history))
        if self.conv is not None:
            streams = streams_of(behind, None, self._documents(behind, x, cu_seqlens))
            mixed = self.conv(mixed, None, streams)[0][:, behind.shape[1] - x.shape[1] :]
        tokens = self._tokens(mixed, self._gates(x, None))
        readings = _over_heads(
            self._rule,
            tokens,
            self.context_group,
            initial_state=self.initial_state,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        return self._output(x, readings, tokens[2])


class SlicedDeltaNet(SlicedRecurrent, GatedDeltaNet):
    """Gated DeltaNet on a slice of time."""


class SlicedKimi(SlicedRecurrent, KimiDeltaAttention):
    """Kimi Delta Attention on a slice of time."""


class SlicedMamba2(SlicedRecurrent, Mamba2):
    """Mamba2 on a slice of time."""


class SlicedRaven(SlicedRecurrent, Raven):
    """Raven on a slice of time."""


class SlicedProductKeys(_OnSlices, ProductKeyMemory):
    """Product-key memory on a slice of time. It works token by token, and ignores document boundaries."""

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, **others: object) -> Tensor:  # type: ignore[override]
        """Return this rank's slice of the output, given its slice of the input."""
        _refuse(**others)
        y = ProductKeyMemory.forward(self, x)
        assert isinstance(y, Tensor)
        return y


def _over_heads(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    tokens: tuple[Tensor, ...],
    group: Group,
    initial_state: Tensor | None,
    **options: object,
) -> Tensor:
    """A rule on tokens [B,T/P,H,...]: slices of time become slices of heads, and after it slices of time again."""
    if initial_state is not None:
        initial_state = initial_state.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    whole = (all_to_all(x, group, split=2, join=1) for x in tokens)
    readings, _ = rule(*whole, initial_state=initial_state, **options)
    return all_to_all(readings, group, split=1, join=2)


class SlicedFullAttention(_OnSlices, FullAttention):
    """Full attention on a slice of time, with keys and values of the whole sequence gathered.

    With grouped heads they are the smaller part. torch's ring attention (2.13) has no CPU kernel, takes no packed
    documents, and assigns tokens to ranks in another order than the other layers need."""

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, **others: object) -> Tensor:  # type: ignore[override]
        """Return this rank's slice of the output, given its slice of the input."""
        _refuse(**others)
        start, end = self._span(x, x)
        bounds = [0, end] if cu_seqlens is None else cu_seqlens.clamp(max=end).unique_consecutive().tolist()
        query, key, value = self._project(x, self._positions(x, x, cu_seqlens))
        key, value = (y.transpose(1, 2) for y in gather_time(self.context_group, key, value))
        query, mixed = query.transpose(1, 2), []
        for first, last in itertools.pairwise(bounds):
            if last <= start:
                continue
            begin = max(first, start)
            ahead = torch.full((len(x),), begin - first, device=x.device)
            asking, seen = slice(begin - start, last - start), slice(first, last)
            mixed.append(attend_blocks(query[:, :, asking], key[:, :, seen], value[:, :, seen], ahead))
        return self._output(x, torch.cat(mixed, dim=2).transpose(1, 2) if mixed else query.transpose(1, 2))


def _becomes(kind: type[_OnSlices]) -> Callable[[nn.Module, Group], None]:
    """A layer becomes one on slices in place: its parameters must stay where others hold them, as with FSDP."""

    def split(layer: nn.Module, group: Group) -> None:
        layer.__class__ = kind
        assert isinstance(layer, _OnSlices)
        layer.context_group = group

    return split


def _split_memory(layer: nn.Module, group: Group) -> None:
    assert isinstance(layer, SparseDeltaMemory)
    SplitMemory.of(layer).context_group = group


def _split_shifted(layer: nn.Module, group: Group) -> None:
    assert isinstance(layer, ShiftedKeys)
    _becomes(SlicedShiftedKeys)(layer, group)
    _SPLIT[_kind(layer.layer) or type(None)](layer.layer, group)  # type: ignore[index]


_SPLIT: dict[type[nn.Module], Callable[[nn.Module, Group], None]] = {
    SlidingWindowAttention: _becomes(SlicedWindow),
    TokenShift: _becomes(SlicedShift),
    ShiftedKeys: _split_shifted,
    SparseDeltaMemory: _split_memory,
    KimiDeltaAttention: _becomes(SlicedKimi),  # before GatedDeltaNet, which it is one of
    GatedDeltaNet: _becomes(SlicedDeltaNet),
    Mamba2: _becomes(SlicedMamba2),
    Raven: _becomes(SlicedRaven),
    FullAttention: _becomes(SlicedFullAttention),
    ProductKeyMemory: _becomes(SlicedProductKeys),
}
