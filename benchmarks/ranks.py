"""What several ranks save and cost: memory of channel and context ranks, speed of data ranks, and is the plan right?

Processes of one machine over gloo, one thread each. Memory is the growth of a process over its steps, as the system
counts it; the plan is made for the same steps.

    python benchmarks/ranks.py [memory | speed]
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _harness import Ratio, report
from _rank_jobs import VOCABULARY, Case
from sdm.models.model_config import ModelConfig
from sdm.plan import Workload
from sdm.plan.dry_run import dry_run
from sdm.plan.estimate import memory
from sdm.run.mesh import Mesh

WORKER = Path(__file__).with_name("_rank_jobs.py")
LONG = {"hidden_size": 256, "num_hidden_layers": 4, "num_slots": 4096, "num_writes": 32, "num_reads": 32}
WIDE = {"hidden_size": 384, "num_hidden_layers": 4, "num_slots": 9216, "num_writes": 32, "num_reads": 32}
MESHES = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 1, 2)],
}
TURNS, STEPS = 9, 1


def cases(ranks: int) -> list[Case]:
    """Steps that are mostly activations, with and without checkpointing, and such as are mostly weights and M0, with
    weights that are gathered twice or kept."""
    return [
        case
        for mesh in MESHES[ranks]
        for case in (
            Case("long", mesh, LONG, 3072),
            Case("checkpointed", mesh, LONG, 3072, "block"),
            Case("wide", mesh, WIDE, 256),
            Case("kept", mesh, WIDE, 256, keep_weights=True),
        )
    ]


def planned(case: Case) -> float:
    """Bytes of a rank by the plan, for the core for CPUs with one thread."""
    model = ModelConfig(**case.model).build(VOCABULARY)
    work = Workload(
        model,
        Mesh(*case.mesh),
        case.length,
        case.rows,
        1,
        "float32",
        case.checkpointing,
        case.keep_weights,
        on_cpu=True,
    )
    return memory(work, dry_run(work)).total


def launch(ranks: int, *arguments: str) -> subprocess.Popen[str]:
    # Freed memory goes back to the system at once, so that a peak is one of what is in use.
    quiet = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, str(WORKER), *arguments], env=os.environ | quiet, stdout=subprocess.PIPE, text=True
    )


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (f"line {number} of a long text about memory\n" for number in range(8000))
        (folder / "text.txt").write_text("".join(lines))
        yield folder


def measured(ranks: int) -> list[tuple[Case, list[dict[str, int]]]]:
    with workplace() as folder:
        process = launch(ranks, "peaks", str(folder), json.dumps([case.to_json() for case in cases(ranks)]))
        printed, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{ranks} ranks failed")
        said = [json.loads(line)["ranks"] for line in printed.splitlines() if line.startswith("{")]
    return list(zip(cases(ranks), said, strict=True))


def main_memory() -> None:
    tables, peaks, deviations, notes = {}, {}, [], {}
    for ranks in MESHES:
        for case, said in measured(ranks):
            peak, plan = max(one["peak"] for one in said), planned(case)
            peaks[case.name, case.mesh], tables[case.name, case.mesh] = peak, max(one["tables"] for one in said)
            deviations.append(abs(plan / peak - 1))
            name = f"{case.name} {'x'.join(map(str, case.mesh))}"
            notes[name] = {"measured MB": round(peak / 1e6, 1), "planned / measured": round(plan / peak, 3)}
            print(f"{name:<24} measured {peak / 1e6:7.1f} MB, planned / measured {plan / peak:.3f}", flush=True)
    one, channel, context = (1, 1, 1), (1, 1, 4), (1, 4, 1)
    report(
        "ranks_memory",
        [
            Ratio(
                "M0, its moments and tables of a rank, 4 channel ranks / 1",
                tables["wide", channel] / tables["wide", one],
                0.27,
            ),
            Ratio(
                "peak memory of a rank, 3072 tokens, 4 context ranks / 1",
                peaks["long", context] / peaks["long", one],
                0.35,
            ),
            Ratio("largest deviation of planned from measured peak memory", max(deviations), 0.10),
        ],
        {},
        notes,
    )


def main_speed() -> None:
    """One process, two, and two that keep the weights they gathered take turns."""
    found: dict[str, list[dict[str, float]]] = {"1": [], "2": [], "2-kept": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = {}
        for kind in found:  # one after the other: the first one tokenises
            jobs[kind] = launch(int(kind[0]), "speed", name, kind, str(TURNS), str(STEPS))
        for turn in range(TURNS):
            for kind, job in jobs.items():
                (folder / f"speed-{kind}-{turn}").touch()
                assert job.stdout is not None
                line = next((line for line in job.stdout if line.startswith("{")), None)
                if line is None:
                    raise SystemExit(f"{kind}: the ranks failed")
                found[kind].append(json.loads(line))
        for job in jobs.values():
            job.communicate()
    seconds = {key: {n: [one[key] for one in turns] for n, turns in found.items()} for key in ("wall", "busy")}
    wall, busy = ({n: statistics.median(times) for n, times in seconds[key].items()} for key in ("wall", "busy"))
    report(
        "ranks_speed",
        [
            Ratio("tiny-code tokens/s, 2 data ranks / 1 process", wall["1"] / wall["2"], 1.6, at_least=True),
            Ratio("the same with mesh.keep_weights", wall["1"] / wall["2-kept"], 1.6, at_least=True),
        ],
        {f"a step on {n}": value for n, value in wall.items()},
        {
            "load": os.getloadavg(),
            "processor seconds of a step, 1 process / a rank of 2": round(busy["1"] / busy["2"], 3),
            "quickest turns": round(min(seconds["wall"]["1"]) / min(seconds["wall"]["2"]), 3),
            "turns": found,
        },
    )


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["memory", "speed"]
    for part in wanted:
        {"memory": main_memory, "speed": main_speed}[part]()
