"""What an installation needs, and what it does where something is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def found(pattern: str, path: str) -> list[str]:
    return re.findall(pattern, (ROOT / path).read_text())


def test_one_oldest_python_everywhere() -> None:
    versions = {
        "metadata": found(r'requires-python = ">=(.*)"', "pyproject.toml"),
        "ruff": [PROJECT["tool"]["ruff"]["target-version"].replace("py3", "3.")],
        "mypy": [PROJECT["tool"]["mypy"]["python_version"]],
        "wheel": [PROJECT["tool"]["scikit-build"]["wheel"]["py-api"].replace("cp3", "3.")],
        "README": found(r"Python (3\.\d+) or newer", "README.md"),
        "constraints": found(r"on Python (3\.\d+) and newer", "constraints.txt"),
        "CMake": found(r"USE_SABI (3\.\d+)", "src/sdm/native/CMakeLists.txt"),
        "header": [f"3.{int(n, 16)}" for n in found(r"Py_LIMITED_API 0x03(..)0000", "src/sdm/native/binding.h")],
    }
    assert all(version == ["3.11"] for version in versions.values()), versions
    assert "python_version" not in (ROOT / "constraints.txt").read_text(), "a version for some Pythons only"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("index", ["", "https://example.org/cpu"])
def test_torch_alone_comes_from_an_index_of_its_own(tmp_path: Path, index: str) -> None:
    command = ["make", "--dry-run", "setup", f"VENV={tmp_path / 'venv'}", f"TORCH_INDEX={index}"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line.split("constraints.txt")[1].split() for line in printed.splitlines() if "pip install" in line]
    assert installs[0] == ([*(["--index-url", index] if index else []), "torch"])
    assert len(installs) > 1
    assert not any("--index-url" in arguments for arguments in installs[1:])


def configure(folder: Path, *options: str, succeeds: bool = True, **environment: str) -> str:
    """What CMake says about a build in a folder."""
    command = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(folder), f"-DPython_EXECUTABLE={sys.executable}"]
    ambient = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": TOOLS}
    done = subprocess.run([*command, *options], env=ambient | environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == succeeds, done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.skipif(shutil.which("cmake", path=TOOLS) is None, reason="needs cmake")
def test_no_compiler_no_core(tmp_path: Path) -> None:
    assert "No C++ compiler that works" in configure(tmp_path, succeeds=False, CXX="/bin/false")
    assert "without its compiled core" in configure(tmp_path, "-DSDM_WITHOUT_CORE=ON", CXX="/bin/false")
    install = ["cmake", "--install", str(tmp_path), "--prefix", str(tmp_path / "installed")]
    subprocess.run(install, env=os.environ | {"PATH": TOOLS}, check=True, capture_output=True)
    assert not (tmp_path / "installed").exists()
    # A compiler that is installed later is found, in the same build folder.
    assert "cannot be built with" in configure(tmp_path, succeeds=False), "a core that does not compile is an error"
    assert "core" not in configure(tmp_path, "-DSDM_WITHOUT_CORE=OFF")
    assert "_core" in (tmp_path / "build.ninja").read_text()


BUILD = """
import sys
from scikit_build_core import build
print(getattr(build, sys.argv[2])(sys.argv[1], {"build-dir": sys.argv[1] + "/build"}))
"""


@pytest.mark.skipif(find_spec("scikit_build_core") is None, reason="needs scikit-build-core")
@pytest.mark.skipif(shutil.which("cmake", path=TOOLS) is None, reason="needs cmake")
@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_the_wheel_has_every_module_its_types_and_no_sources_of_the_core(tmp_path: Path, hook: str) -> None:
    environment = os.environ | {"PATH": TOOLS, "CXX": "/bin/false"}  # without the core: nothing to compile
    command = [sys.executable, "-c", BUILD, str(tmp_path), hook]
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl"), "there is nothing of a platform in it"
    if hook == "build_editable":
        return
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("sdm/")}
    files = (path for path in (ROOT / "src/sdm").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    beside = {str(path.relative_to(ROOT / "src")) for path in files}
    assert packed == {name for name in beside if not re.search(r"\.(cpp|h|so|pyd|dylib)$|CMakeLists\.txt$", name)}
    assert "sdm/py.typed" in packed, "type checkers take the annotations of this package"


WITHOUT = """
import sys
from importlib.machinery import PathFinder
class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "sdm.native._core" else super().find_spec(name, path, target)
others = (PathFinder.__name__, "ScikitBuildRedirectingFinder")
sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "__name__", type(f).__name__) not in others] + [Hidden]
sys.path.insert(0, sys.argv[1])
"""
USE = """
import sdm
print("imported", file=sys.stderr, flush=True)
import torch
layer = sdm.SparseDeltaMemory(16, num_slots=16, num_writes=2, num_reads=2)
assert layer(torch.randn(1, 5, 16)).shape == (1, 5, 16)
print(*sdm.ops.available_backends())
"""


def test_a_missing_core_is_said_once_at_import() -> None:
    command = [sys.executable, "-c", WITHOUT + USE, str(ROOT / "src")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if name != "triton"] == ["reference", "chunked"]
    at_import, later = done.stderr.split("imported\n")
    assert at_import.count("without its compiled core") == 1
    assert "C++17 compiler" in at_import
    assert "core" not in later
