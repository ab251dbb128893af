"""Saved models, the small one in this package among them, loaded without trust in what config.json claims.

It may claim any size, and building a model allocates what it claims. So the headers of the weights are read first:
safetensors compares them with the length of the file, they cannot claim what is not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import logging

from sdm.files import check_manifest, explained, read_json, write_bytes
from sdm.models.configuration import SDMConfig
from sdm.models.modeling import SDMForCausalLM

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # beside weights that transformers has split

EXAMPLE_NAME = "example"
EXAMPLE_FOLDER = Path(__file__).parent / "example_model"

CHAT_TEMPLATE = "chat_template.jinja"
# Each message on a line behind its role; the answer ends with the end-of-text token.
_TURNS = """\
{%- for message in messages -%}
{{ message['role'] }}: {{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '' }}
{% endfor -%}
{%- if add_generation_prompt -%}
assistant:
{%- endif -%}
"""

Shapes = dict[str, tuple[int, ...]]


def write_chat_template(folder: Path) -> bool:
    """Give a folder with a tokenizer a simple chat template, unless it has one.

    `transformers serve` and `pipeline` need one to answer chats. It writes each message as "role: content" on a line of
    its own. A base model was not trained on it: fine-tune on conversations in this form before relying on the answers.

    Returns:
        Whether the template was written.
    """
    settings = folder / "tokenizer_config.json"
    if (folder / CHAT_TEMPLATE).exists() or not settings.is_file() or read_json(settings).get("chat_template"):
        return False
    write_bytes(folder / CHAT_TEMPLATE, _TURNS.encode())
    return True


def load_config(folder: Path) -> SDMConfig:
    """The configuration, or a ValueError that names the file."""
    path = folder / CONFIG
    with explained(f"cannot load {path}"):
        fields = read_json(path)
        model_type = fields.get("model_type")
        if model_type != SDMConfig.model_type:
            raise ValueError(
                f"not a model of this library; model_type must be {SDMConfig.model_type!r}, got {model_type!r}"
            )
        if fields.get("transformers_weights") is not None:  # transformers would read that file, whatever it is
            raise ValueError(f"transformers_weights must be left out, the weights are in {WEIGHTS}")
        return SDMConfig.from_dict(fields)


def load_model(folder: Path) -> SDMForCausalLM:
    """The model in evaluation mode, or a ValueError that names the folder."""
    check_manifest(folder)
    config = load_config(folder)
    with explained(f"cannot load the weights in {folder}, export or copy them again"):
        check_fit(config, read_shapes(folder))
        with no_progress_bar():
            return SDMForCausalLM.from_pretrained(folder, config=config, use_safetensors=True).eval()


def example_model() -> tuple[SDMForCausalLM, Any]:
    """Return the example model, in evaluation mode, and its tokenizer.

    It finds numbers by name in text, in the words of RULER's needle tasks, and can do nothing else;
    docs/example-model.md says what it was trained on. The commands take it under the name `example`.

    Returns:
        The model and a tokenizer of transformers.
    """
    from transformers import AutoTokenizer

    return load_model(EXAMPLE_FOLDER), AutoTokenizer.from_pretrained(EXAMPLE_FOLDER)


def read_shapes(folder: Path) -> Shapes:
    """Name and shape of every weight, from the headers alone."""
    shapes: Shapes = {}
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118, not a mapping
                # The weights of a model that was saved without its head have no prefix.
                full = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
                if full in shapes:
                    raise ValueError(f"{name} is there more than once")
                shapes[full] = tuple(weights.get_slice(name).get_shape())
    return shapes


def check_fit(config: SDMConfig, shapes: Shapes) -> None:
    """Raise unless the weights are exactly those of such a model."""
    _check_sizes(config, shapes)
    with torch.device("meta"):
        expected = {name: tuple(x.shape) for name, x in SDMForCausalLM(config).state_dict().items()}
    tied = SDMForCausalLM._tied_weights_keys if config.tie_word_embeddings else {}
    faults = {
        "missing": expected.keys() - shapes.keys() - tied.keys(),
        "unexpected": shapes.keys() - expected.keys(),
        "mismatched": {name for name in expected.keys() & shapes.keys() if expected[name] != shapes[name]},
    }
    for fault, names in faults.items():
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"they do not fit {CONFIG}; {fault}: {', '.join(sorted(names)[:5])}{more}")


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bars within a `with` block."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _check_sizes(config: SDMConfig, shapes: Shapes) -> None:
    """What decides how many modules there are is compared before any is built, even one without memory."""
    table = shapes.get("model.embed_tokens.weight", ())
    if len(table) != 2:
        raise ValueError("they have no table model.embed_tokens.weight")
    layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
    stored = {"vocab_size": table[0], "hidden_size": table[1], "num_hidden_layers": len(layers)}
    for name, value in stored.items():
        if value != getattr(config, name):
            raise ValueError(f"they do not fit {CONFIG}; it has {name} = {getattr(config, name)}, they have {value}")


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads when it is told to read safetensors."""
    names = {WEIGHTS}
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        places = read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ValueError(f"{INDEX} has no weight_map")
        for name, place in places.items():
            if not isinstance(place, str) or place != Path(place).name or not place.endswith(".safetensors"):
                raise ValueError(f"{INDEX} must name .safetensors files beside it, got {str(place)!r} for {name}")
        names = set(places.values())
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"there is no file {name}")
    return [folder / name for name in sorted(names)]
