"""Launches the kernels. Everything here looks at shapes only: nothing waits for the GPU, and on tensors without memory
it is its own shape function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdm.ops.checks import mark_changed
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.ops.sparse_delta_rule.triton.layout import BACKWARD, FORWARD, Accesses, Layout, power
from sdm.ops.triton.launch import is_traced, launch, load_kernel

PARTS = 256 << 20  # bytes that backward's parts of the gradients of weights and gates may take at once
REDUCED = 8  # tokens whose parts a program adds up
TABLE_PROGRAMS = 256  # that packed documents fill a launch with; each of its streams has a table of its own
KINDS = {"planned": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}


class Problem(NamedTuple):
    """Contiguous arguments, and what follows from their shapes."""

    tokens: Tokens
    initial_state: Tensor | None
    num_slots: int
    cu_seqlens: Tensor | None
    slot_rule: bool

    def prepared(self) -> Problem:
        """Return the problem with contiguous tensors and offsets that lie within the row."""
        tokens = Tokens(*(x.contiguous() for x in self.tokens))
        initial = None if self.initial_state is None else self.initial_state.contiguous()
        cu_seqlens = self.cu_seqlens
        if cu_seqlens is not None:
            # Nobody looks at offsets on a GPU. In ascending order and within the row they lead nowhere else.
            cu_seqlens = cu_seqlens.to(tokens.value.device).clamp(0, tokens.value.shape[1]).cummax(0).values
        return self._replace(tokens=tokens, initial_state=initial, cu_seqlens=cu_seqlens)

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic."""
        floats = [x for x in (*self.tokens, self.initial_state) if x is not None and x.is_floating_point()]
        return torch.float64 if any(x.dtype == torch.float64 for x in floats) else torch.float32

    @property
    def sequences(self) -> int:
        """Number of batch rows, or of packed documents."""
        return self.tokens.value.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that every kernel is given."""
        _, time, heads, _ = self.tokens.value.shape
        return {
            "time": time,
            "H": heads,
            "W": self.tokens.write_index.shape[-1],
            "R": self.tokens.read_index.shape[-1],
        }

    def layout(self, limits: Accesses) -> Layout:
        """How the call is cut into programs."""
        sizes, streams = self.sizes, self.sequences * self.sizes["H"]
        return Layout.for_streams(sizes["W"], sizes["R"], self.tokens.value.shape[-1], limits, streams)

    @property
    def options(self) -> dict[str, bool]:
        """The switches that every kernel is compiled with."""
        return {"PACKED": self.cu_seqlens is not None, "SLOT_RULE": self.slot_rule}

    @property
    def per_write(self) -> bool:
        """Whether each write has a log decay of its own."""
        return self.tokens.log_decay.dim() == 4

    def chunks(self, size: int) -> int:
        """At most; those of documents that end early are empty."""
        if self.cu_seqlens is not None:
            return self.sizes["time"] // size + self.sequences
        return self.sequences * -(-self.sizes["time"] // size)

    @property
    def streams(self) -> int:
        """Sequences times heads."""
        return self.sequences * self.sizes["H"]

    def groups(self, layout: Layout, share_tables: bool) -> list[tuple[int, int]]:
        """Streams that run at the same time: the first of them, and how many.

        Each of them has a table. Packed documents share tables with the groups before them if their final states are
        not needed and they begin with the same state. A group has whole documents, or a divisor of a document's heads.
        """
        state, value = self.initial_state, self.tokens.value
        if self.cu_seqlens is None or not share_tables or (state is not None and state.dim() == 4):
            return [(0, self.streams)]
        heads, size = value.shape[2], max(TABLE_PROGRAMS // -(-value.shape[3] // layout.S), 1)
        while size % heads and heads % size:
            size -= 1
        if size < heads:  # all documents with some heads, then with the next
            return [(s * heads + head, size) for head in range(0, heads, size) for s in range(self.sequences)] or [
                (0, 0)
            ]
        return [(first, min(size, self.streams - first)) for first in range(0, self.streams, size)] or [(0, 0)]

    def table(self, start: Tensor | None, dtype: torch.dtype, streams: int | None = None) -> Tensor:
        """New tables [S,H,N,D], filled with given ones; or tables [streams,N,D] for as many streams."""
        value = self.tokens.value
        shape = (self.sequences, value.shape[2], self.num_slots, value.shape[3])
        if streams is None or streams == self.streams:
            if start is None:
                return value.new_zeros(shape, dtype=dtype)
            return value.new_empty(shape, dtype=dtype).copy_(start.expand(shape))
        tables = value.new_zeros((streams, *shape[2:]), dtype=dtype)
        if start is not None:
            # Streams of the first group: heads of a document, or whole documents.
            tables.view(-1, min(streams, shape[1]), *shape[2:]).copy_(start[:streams])
        return tables


class Links(NamedTuple):
    """What `prepare.py` says about the accesses: [B,T,H] and then W, R or C."""

    write_slot: Tensor  # -1 - slot where a later token of the chunk writes it too
    prev: Tensor  # number of the write before, -1: none
    next_of_write: Tensor  # number of the access after
    factor: Tensor  # what the write leaves of its row
    keep: Tensor  # product of the factors from the chunk's start
    solve: Tensor  # [C]
    read_slot: Tensor  # -1 - slot where an earlier access of the chunk is to the same slot
    seen: Tensor  # number of the newest write that the read sees
    read_keep: Tensor
    mix: Tensor  # [C]
    depth: Tensor  # [1], at a chunk's first token: how many writes a walk back meets at most
    length: Tensor  # [1], the same: how many accesses of its slot come after an access at most


def prepare(problem: Problem, layout: Layout) -> Links:
    """Launch the kernel that works out chains, factors and small matrices of each chunk."""

    sizes, tokens, dtype = problem.sizes, problem.tokens, problem.dtype
    W, R, C = sizes["W"], sizes["R"], layout.C

    kinds = {"i4": torch.int32, "i2": torch.int16, "f": dtype}
    arrays = [(W, kind) for kind in ("i4", "i2", "i2", "f", "f")] + [(C, "f")]
    arrays += [(R, kind) for kind in ("i4", "i2", "f")] + [(C, "f"), (1, "i4"), (1, "i4")]
    lead = tokens.value.shape[:3]
    links = Links(*(tokens.value.new_empty((*lead, size), dtype=kinds[kind]) for size, kind in arrays))
    programs = problem.chunks(C) * sizes["H"]
    launch(
        _kernel("prepare"),
        (programs,),
        tokens.write_index,
        tokens.write_weight,
        tokens.beta,
        tokens.log_decay,
        tokens.read_index,
        tokens.read_weight,
        problem.cu_seqlens,
        *links,
        keys=tokens.value.new_empty((programs, layout.J), dtype=torch.int64),
        ranks=tokens.value.new_empty((programs, 2 * layout.J), dtype=torch.int32),
        documents=problem.sequences,
        N=problem.num_slots,
        **sizes,
        C=C,
        WP=layout.WP,
        RP=layout.RP,
        J=layout.J,
        PER_WRITE=problem.per_write,
        **problem.options,
        num_warps=max(min(layout.J // 64, 16), min(layout.J // 32, 4), 1),
    )
    return links


def forward(problem: Problem, in_place: bool = False, final: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Output, table after the last token, residual. In place the initial state [B,H,N,D] is the table.

    Without `final` the table holds nothing of use, and packed documents may share it.
    """

    problem = problem.prepared()
    tokens, layout, dtype = problem.tokens, problem.layout(FORWARD), problem.dtype
    table = problem.initial_state if in_place else None
    if is_traced(tokens.value):
        table = problem.table(problem.initial_state, dtype) if table is None else table
        return torch.empty_like(tokens.value), table, torch.empty_like(tokens.value, dtype=dtype)
    groups = problem.groups(layout, share_tables=not (final or in_place))
    if table is None:
        table = problem.table(problem.initial_state, dtype, groups[0][1])
    y, residual = torch.empty_like(tokens.value), torch.empty_like(tokens.value, dtype=dtype)
    if y.numel() == 0:
        return y, table, residual
    links = prepare(problem, layout)
    channels = tokens.value.shape[-1]
    for at, (begin, count) in enumerate(groups):
        if at > 0:
            restore(problem, layout, links, groups[at - 1], table)
            _next_heads(problem, table, groups[at - 1][0], begin)
        launch(
            _kernel("forward"),
            (count * -(-channels // layout.S),),
            tokens.write_weight,
            tokens.value,
            tokens.beta,
            tokens.read_weight,
            problem.cu_seqlens,
            **_chosen(links, "write_slot prev factor keep solve read_slot read_keep mix depth"),
            table=table,
            residual=residual,
            y=y,
            begin=begin,
            N=problem.num_slots,
            D=channels,
            **problem.sizes,
            C=layout.C,
            WP=layout.WP,
            RP=layout.RP,
            S=layout.S,
            **problem.options,
            **layout.options,
            maxnreg=layout.most_registers,
        )
    return y, table, residual


def restore(
    problem: Problem,
    layout: Layout,
    links: Links,
    group: tuple[int, int],
    table: Tensor,
    allowance: Tensor | None = None,
    grad_table: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """Make the tables of a group of documents ready for the next; add their gradients to `total`."""

    begin, streams = group
    sizes, channels = problem.sizes, problem.tokens.value.shape[-1]
    launch(
        _kernel("restore"),
        (streams * -(-channels // layout.S),),
        cu_seqlens=problem.cu_seqlens,
        **_chosen(links, "write_slot read_slot"),
        initial=problem.initial_state,
        table=table,
        allowance=allowance,
        grad_table=grad_table,
        total=total,
        begin=begin,
        N=problem.num_slots,
        streams=streams,
        totals=1 if total is None else total.shape[:2].numel(),
        D=channels,
        **sizes,
        C=layout.C,
        WP=layout.WP,
        RP=layout.RP,
        S=layout.S,
        INITIAL=problem.initial_state is not None,
        BACKWARD=grad_table is not None,
        TOTAL=total is not None,
        num_warps=layout.warps,
    )


class Plan(NamedTuple):
    """What backward keeps of old rows."""

    rounding_limit: float  # units of rounding that a row may take up, relative to its size, before it is kept
    share: int  # the ring has room for one in so many writes
    kind: str  # "planned", or the format of snapshots of all rows


class Gradients(NamedTuple):
    """The gradients of the inputs, as backward returns them."""

    write_weight: Tensor
    value: Tensor
    beta: Tensor
    log_decay: Tensor
    read_weight: Tensor
    table: Tensor  # [S,H,N,D]; of documents that share tables their sum [H,N,D], or nothing of use without grad_initial
    kept: Tensor  # [slabs,B,T,H] how many rows were kept before each token
    places: Tensor  # [slabs,B,T,H,W] how each row was recovered, see rows.py


def backward(
    problem: Problem,
    plan: Plan,
    residual: Tensor,
    grad_y: Tensor | None,
    grad_table: Tensor | None,
    grad_initial: bool = True,
) -> Gradients:
    """Gradients of all inputs; those of the initial state are left out without `grad_initial`."""

    problem = problem.prepared()
    tokens, layout, dtype, sizes = problem.tokens, problem.layout(BACKWARD), problem.dtype, problem.sizes
    value, cu_seqlens = tokens.value, problem.cu_seqlens
    batch, time, heads, channels = value.shape
    slabs = -(-channels // layout.S)
    traced = is_traced(value)
    groups = [(0, problem.streams)] if traced else problem.groups(layout, share_tables=grad_table is None)
    tables, total = groups[0][1], None
    if grad_initial and len(groups) > 1:
        total = value.new_zeros((max(tables // heads, 1), heads, problem.num_slots, channels), dtype=dtype)

    # Writes of a row, and offsets within the ring of rows that are kept of them.
    near = traced or (time * sizes["W"] + layout.WP) * layout.S < 2**31
    counted = torch.int32 if near else torch.int64

    def scratch(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return value.new_empty(shape, dtype=kind)

    outputs = Gradients(
        torch.empty_like(tokens.write_weight),
        torch.empty_like(value, dtype=dtype),
        torch.empty_like(tokens.beta),
        torch.empty_like(tokens.log_decay),
        torch.empty_like(tokens.read_weight),
        problem.table(grad_table, dtype, tables),
        scratch(slabs, batch, time, heads, kind=counted),
        scratch(slabs, batch, time, heads, sizes["W"], kind=torch.int8 if layout.WP < 128 else torch.int16),
    )
    if traced or value.numel() == 0:
        return outputs
    links = prepare(problem, layout)
    share = plan.share if plan.kind == "planned" else 1
    rings = batch * time * sizes["W"] // share + problem.sequences * layout.WP
    width = layout.S // 2 if plan.kind == "int4" else layout.S
    initial = problem.initial_state
    gates = sizes["W"] if problem.per_write else 1
    parts = sizes["W"] + sizes["R"] + gates + 1
    rows = batch if cu_seqlens is None else 1
    token_bytes = slabs * rows * heads * parts * outputs.value.element_size()
    window = min(max(PARTS // token_bytes, 1), time)
    shared: dict[str, Any] = {
        "cu_seqlens": cu_seqlens,
        "partial": scratch(slabs, rows, window, heads, parts),
        "span": window,
        "PER_WRITE": problem.per_write,
        **{name: sizes[name] for name in ("time", "H", "W", "R")},
    }
    arguments: dict[str, Any] = {
        **{name: getattr(tokens, name) for name in ("write_weight", "beta", "log_decay", "read_weight")},
        **_chosen(links, "write_slot next_of_write factor read_slot mix length"),
        "residual": residual.contiguous(),
        "initial": initial,
        "table": problem.table(initial, dtype, tables),
        "allowance": value.new_full((slabs * tables, problem.num_slots), torch.inf, dtype=dtype),
        "saved": scratch(slabs, rings * heads, width, kind=KINDS[plan.kind] or dtype),
        "scales": scratch(slabs, rings * heads) if plan.kind in ("fp8", "int4") else None,
        "places": outputs.places,
        "counts": outputs.kept,
        "lowest": scratch(slabs * tables, kind=counted),
        "grad_y": torch.zeros_like(value) if grad_y is None else grad_y.contiguous(),
        "grad_table": outputs.table,
        "grad_value": outputs.value,
        "rings": rings,
        "limit": plan.rounding_limit,
        "N": problem.num_slots,
        "D": channels,
        "initial_stride": 0 if initial is None or initial.dim() == 3 else initial.stride(0),
        "WP": layout.WP,
        "RP": layout.RP,
        "S": layout.S,
        "SHARE": share,
        "SMALLEST": layout.S * torch.finfo(dtype).tiny,
        "KIND": plan.kind,
        "INITIAL": initial is not None,
        **problem.options,
        **layout.options,
    }
    for at, (begin, count) in enumerate(groups):
        if at > 0:
            _next_heads(problem, arguments["table"], groups[at - 1][0], begin)
        for low in range((time - 1) // window * window, -1, -window):
            bounds = {"begin": begin, "low": low, "high": low + window}
            launch(_kernel("backward"), (slabs * count,), **shared, **bounds, **arguments, streams=count)
            launch(
                _kernel("reduce"),
                (problem.chunks(REDUCED) * heads,),
                **shared,
                **bounds,
                C=REDUCED,
                documents=problem.sequences,
                count=count,
                grad_write_weight=outputs.write_weight,
                grad_read_weight=outputs.read_weight,
                grad_log_decay=outputs.log_decay,
                grad_beta=outputs.beta,
                slabs=slabs,
                X=min(64, power(parts)),
                PACKED=cu_seqlens is not None,
                num_warps=4,
            )
        if total is not None or at < len(groups) - 1:
            scratches = arguments["table"], arguments["allowance"], outputs.table
            restore(problem, layout, links, (begin, count), *scratches, total)
    if total is not None:
        outputs = outputs._replace(table=total[0] if len(total) == 1 else total.sum(0))
    return outputs


def _next_heads(problem: Problem, tables: Tensor, before: int, begin: int) -> None:
    """Fill the tables of a group with the initial rows of its heads, if these are not those of the group before."""
    initial, heads = problem.initial_state, problem.sizes["H"]
    if initial is not None and before % heads != begin % heads:
        tables.copy_(initial[begin % heads : begin % heads + len(tables)])


def _kernel(module: str) -> Any:
    return load_kernel(__package__, module, f"{module}_kernel")


def _chosen(links: Links, names: str) -> dict[str, Tensor]:
    return {name: getattr(links, name) for name in names.split()}


def forward_(state: Tensor, tokens: Tokens, slot_rule: bool) -> Tensor:
    """The output of T tokens; the state [B,H,N,D] changes where it lies."""
    if not state.is_contiguous():
        raise ValueError(f"state must be contiguous, it is changed in place; got strides {list(state.stride())}")
    y = forward(Problem(tokens, state, state.shape[2], None, slot_rule), in_place=True)[0]
    mark_changed(state)
    return y


def step_(state: Tensor, token: Tokens, slot_rule: bool) -> Tensor:
    """One token; the state [B,H,N,D] changes where it lies."""
    import triton.language as tl

    from sdm.ops.sparse_delta_rule.triton.step import step_kernel

    if not state.is_contiguous():
        raise ValueError(f"state must be contiguous, it is changed in place; got strides {list(state.stride())}")
    token = Tokens(*(x.contiguous() for x in token))
    batch, heads, slots, channels = state.shape
    writes, reads = token.write_index.shape[-1], token.read_index.shape[-1]
    y = torch.empty_like(token.value)
    double = any(x.dtype == torch.float64 for x in (*token, state))
    width = max(power(writes), power(reads))
    S = max(min(4096 // width, 16, power(channels)), 2)
    launch(
        step_kernel,
        (batch * heads * -(-channels // S),),
        *token,
        state,
        y,
        H=heads,
        N=slots,
        D=channels,
        W=writes,
        R=reads,
        WP=power(writes),
        RP=power(reads),
        S=S,
        ACC=tl.float64 if double else tl.float32,
        PER_WRITE=token.log_decay.dim() == 3,
        SLOT_RULE=slot_rule,
        num_warps=max(min(width * S // 256, 8), 1),
    )
    mark_changed(state)
    return y
