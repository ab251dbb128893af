"""The sparse delta rule, a chunk of tokens at a time, in plain PyTorch: runs wherever PyTorch runs.

The README beside this file derives the form. In short, inside a chunk the writes are sorted by (slot, time); what is
left of an earlier write after a later one to the same slot is the product of the decays between the two. These
products give the matrices A (write on write) and QK (read on write), one triangular solve gives every delta of the
chunk, and the memory is touched once, at the chunk's distinct slots.

Backward keeps nothing but the inputs. It runs forward again, remembers the rows that each chunk overwrites, then walks
the chunks in reverse, puts the rows back and differentiates one chunk at a time: memory grows with the rows written,
never with N x (T / chunk).

Shapes: B batch, T time, H heads, W writes, R reads, N slots, D value channels, S sequences (batch rows or documents);
within a chunk: G groups (sequence x head), C tokens, U distinct slots of all groups, E = G*C*W writes sorted by
(slot, time), P how many writes of the chunk the most written slot has.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sdm.ops.backends import Backend, no_forward_mode
from sdm.ops.checks import document_bounds
from sdm.ops.registration import Context
from sdm.ops.sequences import Call
from sdm.ops.sparse_delta_rule.inputs import Tokens, check_values
from sdm.ops.sparse_delta_rule.reference import sparse_delta_rule_reference_, sparse_delta_step_reference_

CHUNK = 64


class Chunk(NamedTuple):
    """The same stretch of time in every sequence that reaches so far."""

    position_GC: Tensor  # into [B*T*H], of each token; past a sequence's end its last token stands in
    valid_GC: Tensor  # False past the end
    table_G: Tensor  # which [N,D] table of the state the group works on


def _chunks(tokens: Tokens, cu_seqlens: Tensor | None, size: int) -> Iterator[Chunk]:
    batch, time, heads, _ = tokens.value.shape
    if cu_seqlens is None:
        bounds = [time * row for row in range(batch + 1)]
    else:
        bounds = document_bounds(cu_seqlens, time)
    device = tokens.value.device
    start_S = torch.tensor(bounds[:-1], device=device)
    length_S = torch.tensor(bounds[1:], device=device) - start_S
    head_H = torch.arange(heads, device=device)
    longest = max((end - start for start, end in itertools.pairwise(bounds)), default=0)
    for first in range(0, longest, size):
        active_A = (length_S > first).nonzero().squeeze(1)
        offset_C = torch.arange(first, min(first + size, longest), device=device)
        last_A1 = length_S[active_A, None] - 1
        token_AC = start_S[active_A, None] + torch.minimum(offset_C, last_A1)
        yield Chunk(
            position_GC=(token_AC[:, None, :] * heads + head_H[:, None]).flatten(0, 1),
            valid_GC=(offset_C <= last_A1).repeat_interleave(heads, dim=0),
            table_G=(active_A[:, None] * heads + head_H).flatten(),
        )


class Addresses(NamedTuple):
    """Which writes of a chunk meet in a slot: everything that follows from the indices alone."""

    slots_U: Tensor  # the distinct slots, as rows of the flat state [S*H*N, D]
    write_row_GCW: Tensor  # into slots_U
    read_row_GCR: Tensor
    order_E: Tensor  # sorts the flat writes by (slot, time)
    token_E: Tensor  # into [G*C], the token of a sorted write
    earlier_EP: Tensor  # into [E]: the sorted write itself, the one before it in its slot, the one before that ...
    exists_EP: Tensor
    last_L: Tensor  # into [E]: the last write to each written slot
    seen_GCR: Tensor  # into [E]: the newest write that a read sees
    hit_GCR: Tensor  # False where the slot was not written before in this chunk


def _match(write_slot_GCW: Tensor, read_slot_GCR: Tensor) -> Addresses:
    size, writes = write_slot_GCW.shape[1:]
    device = write_slot_GCW.device
    both = torch.cat((write_slot_GCW.flatten(), read_slot_GCR.flatten()))
    slots_U, row = both.unique(return_inverse=True)
    write_row = row[: write_slot_GCW.numel()].view_as(write_slot_GCW)
    read_row = row[write_slot_GCW.numel() :].view_as(read_slot_GCR)

    time_C1 = torch.arange(size, device=device)[:, None]
    key_E, order_E = (write_row * size + time_C1).flatten().sort()
    row_E = key_E // size
    entry_E = torch.arange(row_E.numel(), device=device)
    rank_E = entry_E - torch.searchsorted(row_E, row_E)
    step_P = torch.arange(int(rank_E.max()) + 1, device=device)
    last_E = torch.ones_like(row_E, dtype=torch.bool)
    last_E[:-1] = row_E[1:] != row_E[:-1]
    seen = torch.searchsorted(key_E, read_row * size + time_C1, right=True) - 1
    hit = (seen >= 0) & (row_E[seen.clamp(min=0)] == read_row)
    return Addresses(
        slots_U=slots_U,
        write_row_GCW=write_row,
        read_row_GCR=read_row,
        order_E=order_E,
        token_E=order_E // writes,
        earlier_EP=(entry_E[:, None] - step_P).clamp(min=0),
        exists_EP=step_P <= rank_E[:, None],
        last_L=last_E.nonzero().squeeze(1),
        seen_GCR=seen.clamp(min=0),
        hit_GCR=hit,
    )


def _run_chunk(
    addresses: Addresses,
    update: str,
    rows_UD: Tensor,
    write_weight_GCW: Tensor,
    value_GCD: Tensor,
    beta_GC: Tensor,
    log_decay_GCW: Tensor,
    read_weight_GCR: Tensor,
) -> tuple[Tensor, Tensor]:
    """The rows after the chunk and its output [G,C,D]. Differentiable."""
    a = addresses
    size = value_GCD.shape[1]
    weight_E = _take(write_weight_GCW.flatten(), a.order_E)
    log_decay_E = _take(log_decay_GCW.flatten(), a.order_E)

    # left[e, p]: the share of the write p places before e that is left after e. The sums of logarithms are over one
    # slot only and never positive: nothing overflows, nothing cancels.
    left_EP, left_of_start_E = (x.exp() for x in _accumulate(log_decay_E, a, torch.cumsum, 0.0))
    if update == "slot":
        # The per-slot rule also shrinks what a slot holds by 1 - beta k, which may be 0 and so has no logarithm.
        weight_E = weight_E * _take(beta_GC.flatten(), a.token_E)
        shrink_EP, shrink_of_start_E = _accumulate(1 - weight_E, a, torch.cumprod, 1.0)
        left_EP, left_of_start_E = left_EP * shrink_EP, left_of_start_E * shrink_of_start_E
    held_EP = (_take(weight_E, a.earlier_EP) * left_EP).masked_fill(~a.exists_EP, 0)
    writer_EP = a.token_E[a.earlier_EP]

    if update == "delta":
        unsorted_E = torch.empty_like(a.order_E).index_copy(
            0, a.order_E, torch.arange(a.order_E.numel(), device=a.order_E.device)
        )
        left_of_start_GCW = _take(left_of_start_E, unsorted_E).view_as(write_weight_GCW)
        retrieved_GCD = _weighted_sum(rows_UD, a.write_row_GCW, write_weight_GCW * left_of_start_GCW)
        A_GCC = _interactions(a.token_E, writer_EP[:, 1:], weight_E[:, None] * held_EP[:, 1:], beta_GC.shape)
        system_GCC = beta_GC[..., None] * A_GCC + torch.eye(size, dtype=A_GCC.dtype, device=A_GCC.device)
        right_GCD = beta_GC[..., None] * (value_GCD - retrieved_GCD)
        delta_GCD = torch.linalg.solve_triangular(system_GCC, right_GCD, upper=False, unitriangular=True)
    else:
        delta_GCD = value_GCD

    reads = read_weight_GCR.shape[-1]
    reader = torch.arange(beta_GC.numel(), device=rows_UD.device).repeat_interleave(reads)
    seen = a.seen_GCR.flatten()
    hit_weight = (read_weight_GCR * a.hit_GCR).flatten()
    QK_GCC = _interactions(reader, writer_EP[seen], hit_weight[:, None] * _take(held_EP, seen), beta_GC.shape)
    left_for_read_GCR = torch.where(a.hit_GCR, _take(left_of_start_E, a.seen_GCR), 1.0)
    output_GCD = _weighted_sum(rows_UD, a.read_row_GCR, read_weight_GCR * left_for_read_GCR) + QK_GCC @ delta_GCD

    written_L = a.write_row_GCW.flatten()[a.order_E[a.last_L]]
    kept_LD = _take(left_of_start_E, a.last_L)[:, None] * _take(rows_UD, written_L)
    added_LD = _weighted_sum(delta_GCD.flatten(0, 1), writer_EP[a.last_L], _take(held_EP, a.last_L))
    return rows_UD.index_copy(0, written_L, kept_LD + added_LD), output_GCD


def _run_tokens(
    addresses: Addresses,
    update: str,
    rows_UD: Tensor,
    write_weight_GCW: Tensor,
    value_GCD: Tensor,
    beta_GC: Tensor,
    log_decay_GCW: Tensor,
    read_weight_GCR: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same, one token after the other, for chunks with an infinity or NaN: products of whole matrices would
    spread it to tokens that never meet it, since 0 times NaN is NaN."""
    outputs = []
    for c in range(value_GCD.shape[1]):
        write_row_GW = addresses.write_row_GCW[:, c]
        weight_GW1, beta_G11 = write_weight_GCW[:, c, :, None], beta_GC[:, c, None, None]
        decayed_GWD = log_decay_GCW[:, c, :, None].exp() * _take(rows_UD, write_row_GW)
        held_GWD = (weight_GW1 * decayed_GWD).sum(1, keepdim=True) if update == "delta" else decayed_GWD
        written_GWD = decayed_GWD + weight_GW1 * (beta_G11 * (value_GCD[:, c, None] - held_GWD))
        rows_UD = rows_UD.index_copy(0, write_row_GW.flatten(), written_GWD.flatten(0, 1))
        read_GRD = _take(rows_UD, addresses.read_row_GCR[:, c])
        outputs.append((read_weight_GCR[:, c, :, None] * read_GRD).sum(1))
    return rows_UD, torch.stack(outputs, dim=1)


def _finite(*tensors: Tensor) -> bool:
    """Whether all entries are; False also where their sum is too large."""
    return all(bool(x.sum().isfinite()) for x in tensors)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x[index] along the first axis, by index_select: its backward adds in a fixed order, that of x[index] does not."""
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


def _accumulate(x_E: Tensor, a: Addresses, scan: Callable[..., Tensor], neutral: float) -> tuple[Tensor, Tensor]:
    """[e, p]: x from just after the p-th write before e up to e itself; and from the chunk's start up to e."""
    window_EP = _take(x_E, a.earlier_EP).masked_fill(~a.exists_EP, neutral)
    inclusive_EP = scan(window_EP, dim=1)
    exclusive_EP = torch.cat((torch.full_like(inclusive_EP[:, :1], neutral), inclusive_EP[:, :-1]), dim=1)
    return exclusive_EP, inclusive_EP[:, -1]


def _interactions(reader_X: Tensor, writer_XP: Tensor, strength_XP: Tensor, shape: torch.Size) -> Tensor:
    """Adds up, in a matrix [C,C] per group, how strongly a token meets what an earlier token wrote."""
    groups, size = shape
    cell_XP = reader_X[:, None] * size + writer_XP % size
    flat = strength_XP.new_zeros(groups * size * size).index_add(0, cell_XP.flatten(), strength_XP.flatten())
    return flat.view(groups, size, size)


def _weighted_sum(rows: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Sums rows[index] * weight over the last axis of index without gathering the rows."""
    summed = F.embedding_bag(
        index.flatten(0, -2), rows, mode="sum", per_sample_weights=weight.flatten(0, -2).contiguous()
    )
    return summed.view(*index.shape[:-1], rows.shape[-1])


class _Sequences:
    """The flat view of a call that chunks are cut from and put back into."""

    def __init__(self, tokens: Tokens, state: Tensor, cu_seqlens: Tensor | None, size: int) -> None:
        check_values(tokens, state.shape[2])
        if size < 1:
            raise ValueError(f"the chunk size must be at least 1, got {size}")
        writes = tokens.write_index.shape[-1]
        if tokens.log_decay.dim() == 3:
            tokens = tokens._replace(log_decay=tokens.log_decay.unsqueeze(-1).expand(-1, -1, -1, writes))
        self.flat = Tokens(*(x.flatten(0, 2) for x in tokens))
        self.num_slots = state.shape[2]
        self.chunks = list(_chunks(tokens, cu_seqlens, size))

    def cut(self, chunk: Chunk) -> tuple[Addresses, list[Tensor]]:
        """The chunk's addresses, and its floats in the order of `_run_chunk`; tokens past the end do nothing."""
        cut = Tokens(*(x[chunk.position_GC] for x in self.flat))
        base_G11 = chunk.table_G[:, None, None] * self.num_slots
        floats = [cut.write_weight, cut.value, cut.beta, cut.log_decay, cut.read_weight]
        absent = ~chunk.valid_GC
        floats = [x.masked_fill(absent.view(*absent.shape, *[1] * (x.dim() - 2)), 0) for x in floats]
        return _match(cut.write_index + base_G11, cut.read_index + base_G11), floats


@torch.library.custom_op("sdm::sparse_delta_rule_chunked", mutates_args=())
def _forward(
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    update: str,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    tokens = Tokens(write_index, write_weight, value, beta, log_decay, read_index, read_weight)
    state = initial_state.clone(memory_format=torch.contiguous_format)
    return _update_(state, tokens, cu_seqlens, update, chunk_size), state


def _update_(state: Tensor, tokens: Tokens, cu_seqlens: Tensor | None, update: str, chunk_size: int) -> Tensor:
    """Output [B,T,H,D]; the contiguous state [S,H,N,D] changes in place."""
    sequences, value = _Sequences(tokens, state, cu_seqlens, chunk_size), tokens.value
    table = state.view(-1, state.shape[-1])
    output = torch.zeros_like(value, memory_format=torch.contiguous_format)
    flat_output = output.view(-1, value.shape[-1])
    for chunk in sequences.chunks:
        addresses, floats = sequences.cut(chunk)
        old_rows = table[addresses.slots_U]
        rows, output_GCD = _run_chunk(addresses, update, old_rows, *floats)
        if not _finite(rows, output_GCD):
            rows, output_GCD = _run_tokens(addresses, update, old_rows, *floats)
        table[addresses.slots_U] = rows
        flat_output[chunk.position_GC[chunk.valid_GC]] = output_GCD[chunk.valid_GC]
    return output


@torch.library.custom_op("sdm::sparse_delta_rule_chunked_backward", mutates_args=())
def _backward(
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    update: str,
    chunk_size: int,
    grad_output: Tensor,
    grad_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of write_weight, value, beta, log_decay, read_weight, initial_state."""
    tokens = Tokens(write_index, write_weight, value, beta, log_decay, read_index, read_weight)
    sequences = _Sequences(tokens, initial_state, cu_seqlens, chunk_size)
    channels = value.shape[-1]
    state = initial_state.clone(memory_format=torch.contiguous_format).view(-1, channels)
    overwritten = []
    for chunk in sequences.chunks:
        addresses, floats = sequences.cut(chunk)
        rows = state[addresses.slots_U]
        run = _run_chunk
        new_rows, output_GCD = run(addresses, update, rows, *floats)
        if not _finite(new_rows, output_GCD):
            run = _run_tokens
            new_rows, _ = run(addresses, update, rows, *floats)
        written = addresses.write_row_GCW.unique()
        overwritten.append((addresses.slots_U[written], rows[written], run))
        state[addresses.slots_U] = new_rows

    grad_state = grad_state.clone(memory_format=torch.contiguous_format)
    grad_table = grad_state.view(-1, channels)
    flat_grad_output = grad_output.reshape(-1, channels)
    grads = [torch.zeros_like(x) for x in (sequences.flat[i] for i in (1, 2, 3, 4, 6))]
    for chunk in reversed(sequences.chunks):
        slots, rows, run = overwritten.pop()
        state[slots] = rows
        addresses, floats = sequences.cut(chunk)
        grad_output_GCD = flat_grad_output[chunk.position_GC].masked_fill(~chunk.valid_GC[..., None], 0)
        grad_rows = grad_table[addresses.slots_U]
        if not _finite(grad_rows, grad_output_GCD):
            run = _run_tokens
        pullback = torch.func.vjp(functools.partial(run, addresses, update), state[addresses.slots_U], *floats)[1]
        grad_rows, *chunk_grads = pullback((grad_rows, grad_output_GCD))
        grad_table[addresses.slots_U] = grad_rows
        position = chunk.position_GC[chunk.valid_GC]
        for grad, chunk_grad in zip(grads, chunk_grads, strict=True):
            grad[position] = chunk_grad[chunk.valid_GC]
    if log_decay.dim() == 3:
        grads[3] = grads[3].sum(-1)
    shapes = (write_weight, value, beta, log_decay, read_weight)
    return *(grad.view(x.shape) for grad, x in zip(grads, shapes, strict=True)), grad_state  # type: ignore[return-value]


@_forward.register_fake
def _(write_index, write_weight, value, beta, log_decay, read_index, read_weight, initial_state, *_):  # type: ignore[no-untyped-def]
    return value.new_empty(value.shape), initial_state.new_empty(initial_state.shape)


@_backward.register_fake
def _(write_index, write_weight, value, beta, log_decay, read_index, read_weight, initial_state, *_):  # type: ignore[no-untyped-def]
    inputs = (write_weight, value, beta, log_decay, read_weight, initial_state)
    return tuple(x.new_empty(x.shape) for x in inputs)


def _save_inputs(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:-2])
    ctx.update, ctx.chunk_size = inputs[-2:]


def _differentiate(ctx: Context, grad_output: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(*ctx.saved_tensors, ctx.update, ctx.chunk_size, grad_output, grad_state)
    write_weight, value, beta, log_decay, read_weight, initial_state = grads
    return None, write_weight, value, beta, log_decay, None, read_weight, initial_state, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save_inputs)


@torch.library.custom_op("sdm::sparse_delta_rule_chunked_", mutates_args=("state",))
def _forward_(
    state: Tensor,
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    update: str,
) -> Tensor:
    tokens = Tokens(write_index, write_weight, value, beta, log_decay, read_index, read_weight)
    return _update_(state, tokens, None, update, CHUNK)


@_forward_.register_fake
def _(state, write_index, write_weight, value, *_):  # type: ignore[no-untyped-def]
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def sparse_delta_rule_chunked_(call: Call) -> Tensor:
    """Update the state in place. States that are rounded after every write, or not contiguous, go step by step."""
    assert call.state is not None
    if call.state.dtype != call.dtype or not call.state.is_contiguous():
        return sparse_delta_rule_reference_(call)
    y: Tensor = _forward_(call.state, *call.tokens.to(call.dtype), call.update)
    return y


def sparse_delta_rule_chunked(call: Call, chunk_size: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Serve a call in plain PyTorch, a chunk of tokens at a time."""
    tokens, initial_state = call.in_full()
    return _forward(*tokens, initial_state, call.cu_seqlens, call.update, chunk_size)


def _unsupported_reason(call: Call) -> str | None:
    return None if call.single_step or call.in_place else no_forward_mode(call)


CHUNKED = Backend(
    "chunked",
    sparse_delta_rule_chunked,
    sparse_delta_step_reference_,
    unsupported_call=_unsupported_reason,
    run_=sparse_delta_rule_chunked_,
)
