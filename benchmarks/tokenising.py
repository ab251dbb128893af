"""How fast does one core tokenise the built-in code corpus, from files to a verified store?

    python benchmarks/tokenising.py [--output tokenising.json]

Prints megabytes of text per second of CPU time and of wall time, and the CPU time relative to the library's own
encode_batch. The best of three runs counts: other work on the machine only ever makes it slower.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"

from sdm.data import HFTokenizer, open_source, prepare_tokenizer, prepare_tokens


def best_of(run: Callable[[int], None], repeats: int = 3) -> tuple[float, float]:
    """CPU and wall seconds."""
    times = []
    for i in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        run(i)
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    return min(cpu for cpu, _ in times), min(wall for _, wall in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    source = open_source("code")
    texts = [document.text for document in source.documents()]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for spec in ("byte", "bpe:1024", "bpe:4096"):
            # A tokenizer of its own for each run, so that none starts with the words of the one before.
            tokenizers = [prepare_tokenizer(spec, (source,), cache_dir=Path(folder)) for _ in range(3)]
            cpu, wall = best_of(
                lambda i, spec=spec, tokenizers=tokenizers: prepare_tokens(
                    source, tokenizers[i], cache_dir=Path(folder, spec, str(i))
                )
            )
            result = {"tokenizer": spec, "MB/s of CPU time": megabytes / cpu, "MB/s of wall time": megabytes / wall}
            tokenizer = tokenizers[0]
            if isinstance(tokenizer, HFTokenizer):
                library, _ = best_of(
                    lambda i, inner=tokenizer._tokenizer: inner.encode_batch_fast(texts, add_special_tokens=False), 1
                )
                result["CPU time / encode_batch_fast alone"] = cpu / library
            results.append(result)
            numbers = (f"{key} {value:.2f}" for key, value in result.items() if isinstance(value, float))
            print(f"{spec:9}", *numbers, sep="  ")
    if output:
        output.write_text(json.dumps({"corpus": "code", "megabytes": megabytes, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
