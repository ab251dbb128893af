"""The small trained model that the package holds, so that commands and docs have something to work on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdm.models.modeling import SDMForCausalLM
from sdm.models.saved_folder import load_model

NAME = "example"
FOLDER = Path(__file__).parent / "example_model"


def example_model() -> tuple[SDMForCausalLM, Any]:
    """Return the example model, in evaluation mode, and its tokenizer.

    It finds numbers by name in text, in the words of RULER's needle tasks, and can do nothing else;
    docs/example-model.md says what it was trained on. The commands take it under the name `example`.

    Returns:
        The model and a tokenizer of transformers.
    """
    from transformers import AutoTokenizer

    return load_model(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
