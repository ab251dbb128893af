"""Imports go one way, heavy packages are imported where they belong, and the public names are the promised ones."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import sdm

ROOT = Path(sdm.__file__).parent

# Who may import whom: a package may import those in its own set, and itself. `constants`, `errors`, `files`,
# `signals` and `ranks` are single modules.
MAY_IMPORT: dict[str, set[str]] = {
    "native": set(),
    "ops": {"native"},
    "layers": {"ops", "errors"},
    "data": {"constants", "errors", "files"},
    "models": {"layers", "ops", "constants", "errors", "files"},
    "session": {"models", "layers", "errors", "files"},
    "parallel": {"models", "layers", "ops"},
    "run": {"parallel", "models", "layers", "ops", "data", "errors", "files", "signals", "ranks"},
    "training": {
        *("parallel", "run", "models", "layers", "ops", "data"),
        *("__version__", "errors", "files", "signals", "ranks"),
    },
    "plan": {"parallel", "run", "models", "layers", "ops"},
    "evaluation": {"run", "models", "layers", "ops", "data", "errors", "files", "ranks"},
    "analysis": {"plan", "evaluation", "run", "models", "layers", "ops", "native", "data", "errors", "files"},
    "integrations": {"models", "layers"},
    "reproduce": {
        *("plan", "training", "run", "evaluation", "analysis", "models", "layers", "ops", "data"),
        *("errors", "files", "signals", "ranks"),
    },
    "cli": {
        *("reproduce", "training", "plan", "run", "evaluation", "analysis", "session", "models", "ops", "data"),
        *("__version__", "errors", "files", "signals", "ranks"),
    },
}
HEAVY = {"transformers", "tokenizers", "safetensors", "tyro", "rich", "matplotlib", "numpy"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if package not in MAY_IMPORT:  # sdm/__init__.py stands above everything
        return
    for name in imported(path):
        if name.startswith("sdm."):
            target = name.split(".")[1]
            assert target == package or target in MAY_IMPORT[package], f"{package} must not import {name}"
        if package in ("native", "ops", "layers"):
            assert name.split(".")[0] not in HEAVY, f"{package} must not import {name}"
        if name.split(".")[0] == "triton":
            assert "triton" in path.relative_to(ROOT).parent.parts, "triton is imported in folders of that name only"
        if name.split(".")[0] == "vllm":
            assert path.relative_to(ROOT).parts[:2] == ("integrations", "vllm"), "vllm is imported by its plugin only"


def test_contributing_shows_the_same_order() -> None:
    """The chain in CONTRIBUTING.md: nothing to the left of an arrow is imported by what is to its right."""
    text = (ROOT.parents[1] / "CONTRIBUTING.md").read_text()
    chain = next(line for line in text.splitlines() if line.strip().startswith("cli ->"))
    places = {
        name.strip(): place for place, link in enumerate(chain.split("->")) for name in link.strip(" {}").split(",")
    }
    assert set(places) == MAY_IMPORT.keys() - {"data"}
    assert not MAY_IMPORT["data"] & set(places)
    for package, allowed in MAY_IMPORT.items():
        for other in allowed & set(places):
            assert package == "data" or places[package] <= places[other], f"{package} imports {other}"


def undocumented(path: Path) -> list[str]:
    """Public classes, functions and methods of a module that have no docstring."""
    names = []
    for node in ast.iter_child_nodes(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        members = node.body if isinstance(node, ast.ClassDef) else []
        for item in (node, *(x for x in members if isinstance(x, ast.FunctionDef) and not x.name.startswith("_"))):
            if ast.get_docstring(item) is None:
                names.append(node.name if item is node else f"{node.name}.{item.name}")
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_public_definitions_have_docstrings(path: Path) -> None:
    assert undocumented(path) == []


def test_every_package_is_placed() -> None:
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages | {"session"} == MAY_IMPORT.keys()


@pytest.mark.parametrize("module", ["sdm.ops", "sdm"])
def test_core_import_needs_torch_alone(module: str) -> None:
    """numpy is what torch imports by itself where it is installed."""
    code = f"import sys, torch; before = set(sys.modules); import {module}; print(*(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    roots = {name.split(".")[0] for name in result.stdout.split()}
    assert roots - sys.stdlib_module_names - {"torch"} <= {"sdm"}


# A name that is added is added here too, and one that is lost shows.
PUBLIC = {
    sdm: {
        *("MemoryState", "SDMCache", "SDMConfig", "SDMForCausalLM", "SDMModel", "SparseDeltaMemory"),
        *("Session", "__version__", "analysis", "cost", "example_model", "graft", "ladder", "load_grafted"),
        *("ops", "optimize_for_decoding", "ungraft"),
    },
    sdm.ops: {
        *("available_backends", "product_key_topk", "gated_delta_rule", "gated_delta_step_"),
        *("sparse_delta_map", "sparse_delta_rule", "sparse_delta_rule_", "sparse_delta_step_"),
        *("state_space", "state_space_step_", "slot_attention", "slot_attention_step_"),
    },
    sdm.layers: {
        *("FullAttention", "GatedDeltaNet", "GatedMLP", "Mamba2", "ProductKeyMemory", "ShiftedKeys"),
        *("FastWeightMemory", "FastWeightState", "KimiDeltaAttention", "Raven"),
        *("SlidingWindowAttention", "SparseDeltaMemory", "TokenShift", "SequenceLayer", "LayerState", "KeyValueState"),
        *(
            "deterministic",
            "optimize_for_decoding",
            "MemoryTable",
            "NoState",
            "PreviousToken",
            "RecurrentState",
            "ShiftedState",
        ),
    },
    sdm.analysis: {"LayerTrace", "Trace", "forget_tokens", "mask_writes", "trace", "write_trace_page"},
}


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names(module: ModuleType) -> None:
    assert sorted(module.__all__) == sorted(PUBLIC[module])
    for name in PUBLIC[module]:
        assert name == "__version__" or getattr(module, name).__doc__, f"{name} says what it is"


# The specification is fixed: names and order.
SIGNATURES = {
    "sparse_delta_rule": (
        *("write_index", "write_weight", "value", "beta", "log_decay", "read_index", "read_weight", "*initial_state"),
        *("*num_slots", "*output_final_state", "*cu_seqlens", "*update", "*backend"),
    ),
    "sparse_delta_rule_": (
        *("state", "write_index", "write_weight", "value", "beta", "log_decay", "read_index", "read_weight"),
        *("*update", "*backend"),
    ),
    "sparse_delta_step_": (
        *("state", "write_index", "write_weight", "value", "beta", "log_decay", "read_index", "read_weight"),
        *("*update", "*backend"),
    ),
    "product_key_topk": ("scores", "k", "*backend"),
    "slot_attention": (
        *("query", "key", "value", "log_decay", "*initial_state", "*output_final_state", "*cu_seqlens", "*backend"),
    ),
    "gated_delta_rule": (
        *("query", "key", "value", "beta", "log_decay", "*initial_state", "*output_final_state", "*cu_seqlens"),
        "*backend",
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_of_the_ops(name: str) -> None:
    parameters = inspect.signature(getattr(sdm.ops, name)).parameters.values()
    assert tuple("*" * (p.kind is p.KEYWORD_ONLY) + p.name for p in parameters) == SIGNATURES[name]


def test_no_file_is_too_long() -> None:
    for path in modules():
        assert len(path.read_text().splitlines()) <= 600, f"{path}: one idea per file"
