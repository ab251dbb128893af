"""Check an installation from a package: `python tests/installed.py SOURCES [without-core]`, outside of the sources."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any


def main(sources: str, without_core: bool) -> None:
    """Import, train and save a layer, load the example model, and start the command."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sdm
    import torch

    place = Path(sdm.__file__).resolve()
    assert not place.is_relative_to(Path(sources).resolve()), f"{place} is the source tree, not the package"
    assert sdm.__version__ == version("sparse-delta-memory")
    requirements = metadata("sparse-delta-memory").get_all("Requires-Dist") or []
    assert any(line.startswith("torch") for line in requirements)
    backends = sdm.ops.available_backends()
    assert ("native" in backends) == (not without_core), backends
    assert (place.parent / "py.typed").is_file()

    layer = sdm.SparseDeltaMemory(32, num_slots=64, num_writes=4, num_reads=4)
    layer(torch.randn(2, 20, 32)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    loaded: tuple[Any, Any] = sdm.example_model()
    model, tokenizer = loaded
    ids = tokenizer("One of the special", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] > ids["input_ids"].shape[1]

    for arguments in (["--version"], ["--help"], ["ladder"], ["info", "example", "--json"]):
        done = subprocess.run([sys.executable, "-m", "sdm", *arguments], capture_output=True, text=True, check=True)
        assert done.stdout
    print(f"{place.parent}: {', '.join(backends)}")


if __name__ == "__main__":
    main(sys.argv[1], "without-core" in sys.argv[2:])
