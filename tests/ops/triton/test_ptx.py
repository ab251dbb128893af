# ruff: noqa: E501
"""The emulator of compiled kernels and the latency model, on small programs written by hand."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")

HEAD = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1
)
.reqntid 64
{
	.reg .pred 	%p<5>;
	.loc	1 7 0
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b32 	%r1, [kernel_param_1];
	mov.u32 	%r2, %tid.x;
	mul.wide.u32 	%rd2, %r2, 4;
	add.s64 	%rd3, %rd1, %rd2;
"""
TAIL = """
	ret;
$L__func_end0:
}
	.file	1 "/somewhere" "kernel.py"
"""


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.ptx.{name}")


def run(body: str, data: np.ndarray, argument: int = 0, observer: Any = None) -> Any:
    """One block of 64 threads on `data`, which the kernel gets together with an integer."""
    program = module("program").parse(HEAD + body + TAIL)
    memory, races = module("memory").Memory(), module("memory").Races()
    address = memory.add(data.view(np.uint8), "data", data.itemsize)
    block = module("machine").Block(program, memory, [address, argument], 0, 4096, races, observer=observer)
    return block.run()


def evaluate(instructions: str, *values: np.ndarray) -> np.ndarray:
    """Thread t loads values[k][t] as %r10 + k, and stores %r20."""
    data = np.concatenate([x.view(np.uint32) for x in values])
    loads = "".join(f"ld.global.b32 %r{10 + k}, [%rd3+{256 * k}];\n" for k in range(len(values)))
    run(f"{loads}{instructions}\nst.global.b32 [%rd3], %r20;", data)
    return data[:64].copy()


INTEGERS = (np.arange(64) * 2654435761 % 2**32).astype(np.uint32)
OTHERS = (np.arange(64) * 40503 % 1000 + 1).astype(np.uint32)
FLOATS = np.linspace(-3, 5, 64, dtype=np.float32)


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("add.s32 %r20, %r10, %r11;", INTEGERS + OTHERS),
        ("sub.s32 %r20, %r10, 5;", INTEGERS - np.uint32(5)),
        ("mul.hi.u32 %r20, %r10, %r11;", (INTEGERS.astype(np.uint64) * OTHERS >> np.uint64(32)).astype(np.uint32)),
        ("mad.lo.s32 %r20, %r10, %r11, -1;", INTEGERS * OTHERS - np.uint32(1)),
        ("shr.s32 %r20, %r10, 40;", (INTEGERS.view(np.int32) >> 31).view(np.uint32)),
        ("shl.b32 %r20, %r10, 40;", np.zeros(64, np.uint32)),
        ("bfe.u32 %r20, %r10, 4, 3;", INTEGERS >> np.uint32(4) & np.uint32(7)),
        ("rem.u32 %r20, %r10, %r11;", INTEGERS % OTHERS),
        ("prmt.b32 %r20, %r10, %r11, 0x0123;", INTEGERS.byteswap()),
        ("lop3.b32 %r20, %r10, %r11, 0, 0x3c;", INTEGERS ^ OTHERS),
        ("shfl.sync.bfly.b32 %r20, %r10, 3, 31, -1;", INTEGERS[np.arange(64) ^ 3]),
        ("shfl.sync.up.b32 %r20|%p1, %r10, 2, 0, -1;", INTEGERS[np.where(np.arange(64) % 32 < 2, np.arange(64), np.arange(64) - 2)]),
        ("redux.sync.max.s32 %r20, %r11, -1;", np.repeat(OTHERS.reshape(2, 32).max(1), 32)),
        ("setp.gt.s32 %p1, %r10, 0;\nselp.b32 %r20, %r10, %r11, %p1;", np.where(INTEGERS.view(np.int32) > 0, INTEGERS, OTHERS)),
        ("cvt.u16.u32 %rs1, %r10;\ncvt.s32.s16 %r20, %rs1;", INTEGERS.astype(np.int16).astype(np.int32).view(np.uint32)),
        ("mov.b32 {%rs1, %rs2}, %r10;\nmov.b32 %r20, {%rs2, %rs1};", INTEGERS << np.uint32(16) | INTEGERS >> np.uint32(16)),
    ],
)  # fmt: skip
def test_integer_instructions(instructions: str, expected: np.ndarray) -> None:
    assert evaluate(instructions, INTEGERS, OTHERS).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("fma.rn.f32 %r20, %r10, %r11, 0f3F800000;", (FLOATS.astype(float) * FLOATS[::-1] + 1).astype(np.float32)),
        ("max.f32 %r20, %r10, %r11;", np.maximum(FLOATS, FLOATS[::-1])),
        ("neg.f32 %r20, %r10;", -FLOATS),
        ("ex2.approx.f32 %r20, %r10;", np.exp2(FLOATS)),
        ("div.full.f32 %r20, %r10, %r11;", FLOATS / FLOATS[::-1]),
        ("cvt.rni.s32.f32 %r12, %r10;\ncvt.rn.f32.s32 %r20, %r12;", np.rint(FLOATS)),
        ("cvt.rn.bf16.f32 %rs1, %r10;\ncvt.f32.bf16 %r20, %rs1;", None),
    ],
)
def test_float_instructions(instructions: str, expected: np.ndarray | None) -> None:
    result = evaluate(instructions, FLOATS, FLOATS[::-1].copy()).view(np.float32)
    if expected is None:
        import torch

        expected = torch.from_numpy(FLOATS).bfloat16().float().numpy()
    assert result.tolist() == expected.tolist()


def test_comparisons_with_nan() -> None:
    nan, number = np.full(64, np.nan, np.float32), np.ones(64, np.float32)
    for name, expected in (("eq", 0), ("ne", 0), ("neu", 1), ("lt", 0), ("ltu", 1), ("nan", 1), ("num", 0)):
        code = f"setp.{name}.f32 %p1, %r10, %r11;\nselp.b32 %r20, 1, 0, %p1;"
        assert set(evaluate(code, nan, number)) == {expected}, name


def test_threads_that_branch_meet_again() -> None:
    """A loop of as many rounds as the thread's number, a store by each thread, and a barrier that all reach."""
    data = np.zeros(64, np.uint32)
    body = """
	mov.u32 %r3, 0;
$L__loop:
	setp.ge.u32 %p1, %r3, %r2;
	@%p1 bra $L__end;
	add.s32 %r3, %r3, 1;
	bra.uni $L__loop;
$L__end:
	bar.sync 0;
	st.global.b32 [%rd3], %r3;
"""
    block = run(body, data)
    assert data.tolist() == list(range(64))
    assert block.barriers == 1
    with pytest.raises(module("memory").Fault, match="different branches before"):
        run("setp.eq.s32 %p1, %r2, 3;\n@%p1 bra $L__x;\nbar.sync 0;\n$L__x:\nmov.u32 %r3, 0;", data)


def test_accesses_out_of_bounds() -> None:
    fault = module("memory").Fault
    with pytest.raises(fault, match=r"out of bounds: data has 252 bytes, offset 252 size 4, kernel\.py:7"):
        run("ld.global.b32 %r3, [%rd3];", np.zeros(63, np.uint32))
    with pytest.raises(fault, match="belongs to no tensor"):
        run("mov.b64 %rd4, 64;\nld.global.b32 %r3, [%rd4];", np.zeros(64, np.uint32))
    with pytest.raises(fault, match="misaligned"):
        run("ld.global.b32 %r3, [%rd1+2];", np.zeros(64, np.uint32))
    with pytest.raises(fault, match="shared memory"):
        run("mov.b32 %r3, 8192;\nst.shared.b32 [%r3], %r2;", np.zeros(64, np.uint32))
    with pytest.raises(fault, match="unknown instruction"):
        run("frobnicate.b32 %r3, %r2;", np.zeros(64, np.uint32))
    # Threads that are masked touch nothing.
    run("setp.lt.s32 %p1, %r2, 63;\n@%p1 ld.global.b32 %r3, [%rd3];", np.zeros(63, np.uint32))


SHIFTED = """
	shl.b32 %r3, %r2, 2;
	xor.b32 %r4, %r3, 128;
	st.shared.b32 [%r3], %r2;
	{barrier}
	ld.shared.b32 %r5, [%r4];
	st.global.b32 [%rd3], %r5;
"""


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "bar.warp.sync -1;"])
def test_warps_race_without_a_barrier(barrier: str) -> None:
    """Warp 0 reads what warp 1 wrote."""
    data = np.zeros(64, np.uint32)
    races = run(SHIFTED.format(barrier=barrier), data).races.counts
    if "warp" in barrier:
        assert races == {("read after write", "shared memory", "kernel.py:7"): 64}
    else:
        assert not races
        assert data.tolist() == [x ^ 32 for x in range(64)]


def test_removing_a_barrier_is_seen() -> None:
    program = module("program").parse(HEAD + SHIFTED.format(barrier="bar.sync 0;") + TAIL)
    assert program.barriers() == ["kernel.py:7"]
    assert not program.without_barriers("kernel.py:7").barriers()
    assert program.without_barriers("kernel.py:8").barriers()


@pytest.mark.parametrize(("body", "kind"), [
    ("st.global.b32 [%rd1], %r2;", "different values at once"),
    ("ld.global.b32 %r3, [%rd3];\nadd.s64 %rd4, %rd3, 4;\nsetp.lt.s32 %p1, %r2, 63;\n@%p1 st.global.b32 [%rd4], %r2;", "write after read"),
    ("add.s64 %rd4, %rd3, 4;\nsetp.lt.s32 %p1, %r2, 63;\nst.global.b32 [%rd3], %r2;\n@%p1 st.global.b32 [%rd4], %r2;", "write after write"),
    ("st.global.b32 [%rd1], %r1;", None),
])  # fmt: skip
def test_kinds_of_races(body: str, kind: str | None) -> None:
    races = run(body, np.zeros(64, np.uint32)).races.counts
    assert {race for race, _, _ in races} == ({kind} if kind else set())


def test_blocks_of_a_launch_race() -> None:
    data = np.zeros(64, np.uint32)
    program = module("program").parse(HEAD + "st.global.b32 [%rd3], %r1;" + TAIL)
    memory, races = module("memory").Memory(), module("memory").Races()
    address = memory.add(data.view(np.uint8), "data", 4)
    first = module("machine").Block(program, memory, [address, 5], 0, 0, races).run()
    later = first.moment + 1
    # A block of another launch is ordered after it; one of the same launch is not.
    module("machine").Block(program, memory, [address, 5], 0, 0, races, later, launch=later).run()
    assert not races.counts
    module("machine").Block(program, memory, [address, 5], 1, 0, races, later + 1, launch=later).run()
    assert set(races.counts) == {("between blocks", "data", "kernel.py:7")}


def test_latency() -> None:
    """A load that is waited for, two that overlap, a barrier; and blocks that share a multiprocessor."""
    from sdm.plan.kernel_time import GPUS, Estimate, Usage, estimate

    latency, gpu = module("latency"), GPUS["H100"]

    def cycles(body: str) -> tuple[float, float]:
        schedule = latency.Schedule(gpu, 1e6)
        run(body, np.zeros(128, np.uint32), observer=schedule)
        return schedule.usage.reordered, schedule.usage.in_order

    nothing = cycles("")
    loads = "ld.global.b32 %r3, [%rd3];\n{use}\nld.global.b32 %r4, [%rd3+256];\nadd.s32 %r5, %r3, %r4;"
    together, apart = cycles(loads.format(use="")), cycles(loads.format(use="add.s32 %r6, %r3, 1;"))
    assert gpu.memory_latency < together[1] - nothing[1] < 1.2 * gpu.memory_latency
    # In the order of the program the second load waits for the use of the first. A better order does not.
    assert apart[1] > 1.9 * gpu.memory_latency
    assert apart[0] < 1.2 * gpu.memory_latency
    # What was touched before is in the cache; a barrier keeps its cost.
    again = cycles(
        "ld.global.b32 %r3, [%rd3];\nbar.sync 0;\nadd.s32 %r4, %r3, 1;\nld.global.b32 %r5, [%rd3];\nadd.s32 %r6, %r5, 1;"
    )
    assert gpu.l2_latency + gpu.memory_latency < again[1] < 2 * gpu.memory_latency

    taken = 256, 128, 1024  # threads, registers, shared memory
    assert gpu.resident(*taken) == 2
    usage = Usage(in_order=1000, reordered=800, issue=300, path=100, memory=32)
    alone = estimate(gpu, usage, gpu.multiprocessors, *taken)
    assert (alone.low, alone.high) == pytest.approx((800 / gpu.clock, 1000 / gpu.clock))
    two = estimate(gpu, usage, 2 * gpu.multiprocessors, *taken)
    assert two == Estimate(alone.low, alone.high, 2 * alone.bandwidth)
    three = estimate(gpu, usage, 3 * gpu.multiprocessors, *taken)
    assert three.high == pytest.approx(2 * alone.high)
    bound = estimate(gpu, Usage(10, 10, 10, 10, 1e6), 1320, *taken)
    assert bound.high == bound.bandwidth == pytest.approx(1320e6 / 0.9 / gpu.bandwidth)
