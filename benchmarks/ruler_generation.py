"""How long a sample of each RULER task takes to make: python benchmarks/ruler_generation.py [LENGTH]

"first" holds finding out how much haystack samples of a task need; the others follow from there. The target is 2
seconds at 131,072 tokens. Processor time is counted, which other programs do not slow down much.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time

from sdm.data.sources import open_source
from sdm.data.tokenization import ByteTokenizer, Tokenizer, train_bpe
from sdm.evaluation.ruler.sample import Generator, counter
from sdm.evaluation.ruler.tasks import TASKS

SAMPLES = 5


def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 131072
    some = (document.text for document in itertools.islice(open_source("text").documents(), 20))
    tokenizers: dict[str, Tokenizer] = {"byte": ByteTokenizer(), "bpe 4096": train_bpe(some, 4096)}
    print(f"{'processor seconds':<18}" + "".join(f"{name:>10} first   median  slowest" for name in tokenizers))
    for task in TASKS:
        row = f"{task:<18}"
        for tokenizer in tokenizers.values():
            generator, times = Generator(counter(tokenizer)), []
            for index in range(SAMPLES + 1):
                start = time.process_time()
                sample = generator.sample(task, length, index)
                times.append(time.process_time() - start)
                assert 0.99 * length <= sample.prompt_tokens + sample.new_tokens <= length
            first, *others = times
            row += f"{first:>16.2f}{statistics.median(others):>9.2f}{max(others):>9.2f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
