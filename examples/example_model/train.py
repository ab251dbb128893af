"""Train the model of `sdm.example_model()`: a few minutes on an idle core.

    python examples/example_model/train.py FOLDER

The model is a hybrid of 0.4M parameters: sliding-window attention over 12 tokens, and one SDM layer that has to carry
everything else. Half of the rows are code of the Python standard library. The others are conversations in which the
user states facts ("the door is green.") and asks for them later, sometimes behind a stretch of code. The words are
those of the standard library's own comments and docstrings: the interpreter is all the data that this needs.

The end-of-text token follows every document and every answer. Conversations grow from one fact to `LARGEST` of them.
"""

from __future__ import annotations

import argparse
import collections
import math
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import sdm
from sdm.data import Tokenizer, load_tokenizer, open_source, train_bpe
from sdm.files import read_json, write_json
from sdm.models.manifest import MANIFEST, write_manifest
from sdm.run.config import OptimConfig
from sdm.run.export import export_model
from sdm.training.optimizer import make_optimizer, set_learning_rate

VOCABULARY = 1024
ROWS, LENGTH = 4, 1024  # of a step
LARGEST = 40  # facts of a conversation
STATEMENT, ANSWER, VALUE = 0.2, 1.0, 4.0  # weights of tokens in the loss; code has 1
HELD_OUT = 20  # every so manieth file of the standard library

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "sdm", "sliding_attention"],
    "num_attention_heads": 2,
    "sliding_window": 12,
    "num_slots": 1024,
    "num_writes": 16,
    "num_reads": 16,
    "initializer_range": 0.1,
    "shift_keys": True,
    "tie_query_initialization": True,
    "tie_word_embeddings": True,
}


def common_words(texts: list[str]) -> list[str]:
    """Return words of three to eight letters that occur often in comments and docstrings, most frequent first."""
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        for line in re.findall(r'#.*|"""(?:.|\n)*?"""', text):
            counts.update(re.findall(r"(?<![\w.'\"-])[a-z]{3,8}(?![\w('\"-])", line))
    return [word for word, count in counts.most_common(1200) if count >= 20]


class Conversations:
    """Random conversations: facts, and questions for them."""

    def __init__(self, words: list[str], tokenizer: Tokenizer, code: list[list[int]], seed: int) -> None:
        self.words, self.tokenizer, self.code = words, tokenizer, code
        self.random = random.Random(seed)

    def value(self) -> str:
        """Return what a fact says: a word or a number."""
        if self.random.random() < 0.4:
            return str(self.random.randrange(10 ** self.random.randint(1, 4)))
        return self.random.choice(self.words)

    def row(self, length: int, largest: int) -> tuple[list[int], list[float]]:
        """Return the tokens of a row and their weights in the loss."""
        tokens: list[int] = []
        weights: list[float] = []

        def add(text: str, weight: float) -> None:
            ids = self.tokenizer.encode(text)
            tokens.extend(ids)
            weights.extend([weight] * len(ids))

        def end(weight: float) -> None:
            tokens.append(self.tokenizer.eos_id)
            weights.append(weight)

        while len(tokens) < length:
            facts: dict[str, str] = {}
            count = max(1, round(math.exp(self.random.uniform(0, math.log(largest)))))
            behind_code = self.random.random() < 0.3
            for noun in self.random.sample(self.words, count):
                facts[noun] = self.value()
            statements = list(facts.items())
            for noun in self.random.sample(list(facts), count // 8):  # what was said last counts
                facts[noun] = self.value()
                statements.append((noun, facts[noun]))
            asked = [*facts, *self.random.choices(list(facts), k=max(2, count // 2))]
            self.random.shuffle(asked)
            for noun, value in statements:
                add(f"user: the {noun} is {value}.\nassistant:", STATEMENT)
                add(" ok.", STATEMENT)
                end(STATEMENT)
                add("\n", STATEMENT)
            if behind_code:
                document = self.random.choice(self.code)
                start = self.random.randrange(max(1, len(document) - 64))
                part = document[start : start + self.random.randint(32, 400)]
                tokens.extend(part)
                weights.extend([1.0] * len(part))
                end(STATEMENT)
                add("\n", STATEMENT)
            for noun in asked:
                add(f"user: what is the {noun}?\nassistant:", STATEMENT)
                add(f" the {noun} is", ANSWER)
                add(f" {facts[noun]}", VALUE)
                add(".", ANSWER)
                end(ANSWER)
                add("\n", STATEMENT)
            end(STATEMENT)
        return tokens[:length], weights[:length]


class Code:
    """Rows of the standard library's files, one after the other in a random order."""

    def __init__(self, files: list[list[int]], eos: int, seed: int) -> None:
        self.files, self.eos, self.random = files, eos, random.Random(seed)
        self.queue: list[int] = []

    def row(self, length: int) -> tuple[list[int], list[float]]:
        """Return the next `length` tokens."""
        while len(self.queue) < length:
            self.queue += [self.eos, *self.random.choice(self.files)]
        row, self.queue = self.queue[:length], self.queue[length:]
        return row, [1.0] * length


def learning_rate(step: int, steps: int) -> float:
    """Return the share of the highest learning rate: warmup over 100 steps, cosine over the last 40%."""
    start = int(0.6 * steps)
    falling = 0.5 * (1 + math.cos(math.pi * max(0, step - start) / max(1, steps - start)))
    return min(1.0, (step + 1) / 100) * falling


@torch.inference_mode()
def accuracy(model: sdm.SDMForCausalLM, conversations: Conversations, facts: int, rows: int = 8) -> float:
    """Return the share of value tokens that the model would answer right."""
    right = asked = 0
    for _ in range(rows):
        tokens, weights = conversations.row(LENGTH, facts)
        logits = model(torch.tensor([tokens])).logits[0, :-1]
        wanted = torch.tensor(weights[1:]) == VALUE
        right += int((logits.argmax(-1) == torch.tensor(tokens[1:]))[wanted].sum())
        asked += int(wanted.sum())
    return right / asked


def package(folder: Path) -> None:
    """Leave out the file of code: the package is that code, and Python would compile the file beside the weights."""
    (folder / "modeling_sdm.py").unlink()
    config = read_json(folder / "config.json")
    del config["auto_map"]
    write_json(folder / "config.json", config)
    (folder / MANIFEST).unlink()
    write_manifest(folder)


def main() -> None:
    """Train the model and export it into FOLDER/model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    options.folder.mkdir(parents=True, exist_ok=True)

    texts = [document.text for document in open_source("code").documents()]
    words = common_words(texts)
    rng = random.Random(0)
    spoken = " ".join(
        f" the {rng.choice(words)} is {rng.choice(words)}. what user: assistant: ok." for _ in range(20000)
    )
    tokenizer = train_bpe([*texts, spoken], VOCABULARY)
    tokenizer.save(options.folder / "tokenizer")
    tokenizer = load_tokenizer(options.folder / "tokenizer")
    files = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    training = [ids for place, ids in enumerate(files) if place % HELD_OUT and len(ids) > 100]
    code = Code(training, tokenizer.eos_id, options.seed)
    talk = Conversations(words, tokenizer, training, options.seed)

    config = sdm.SDMConfig(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_id, **CONFIG)
    model = sdm.SDMForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(words)} words", flush=True)
    optimizer = make_optimizer(model, OptimConfig(lr=options.lr))
    begin, recent = time.time(), collections.deque[float](maxlen=50)
    for step in range(options.steps):
        share = min(1.0, step / (0.5 * options.steps))
        largest = max(2, round(2 * (LARGEST / 2) ** share))
        length = LENGTH // 2 if step < options.steps // 4 else LENGTH
        rows = [talk.row(length, largest) if row % 2 else code.row(length) for row in range(ROWS * LENGTH // length)]
        tokens_BT = torch.tensor([tokens for tokens, _ in rows])
        weights_BT = torch.tensor([weights for _, weights in rows])[:, 1:]
        logits_BTV = model(tokens_BT, use_cache=False).logits[:, :-1]
        losses_BT = F.cross_entropy(logits_BTV.transpose(1, 2), tokens_BT[:, 1:], reduction="none")
        loss = (losses_BT * weights_BT).sum() / weights_BT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_learning_rate(optimizer, learning_rate(step, options.steps))
        optimizer.step()
        optimizer.zero_grad()
        values = losses_BT[weights_BT == VALUE]
        recent.append(float(values.detach().mean()))
        if step % 20 == 0:
            of_code = float(losses_BT[0::2].detach().mean())
            print(
                f"step {step} loss {loss.item():.3f} code {of_code:.3f} values {sum(recent) / len(recent):.3f} "
                f"facts <= {largest} {time.time() - begin:.0f} s",
                flush=True,
            )
        if step % 50 == 49 or step == options.steps - 1:
            model.eval()
            package(export_model(model, tokenizer, options.folder / "model", chat_template=True))
            held_out = Conversations(words, tokenizer, training, 10**6)
            print(f"right: {accuracy(model, held_out, 4):.3f} of few, {accuracy(model, held_out, LARGEST):.3f} of many")
            model.train()


if __name__ == "__main__":
    main()
