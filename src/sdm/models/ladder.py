"""The paper's scaling ladder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sdm.models.configuration import SDMConfig


@dataclass(frozen=True)
class Level:
    """One row of the paper's table "Scaling ladder configurations"."""

    hidden_size: int
    num_hidden_layers: int
    num_memory_heads: int
    paper_parameters: str
    paper_gdn_state: str
    paper_sdm_state: str
    tokens: float  # of training
    learning_rate: float


LEVELS = {
    1: Level(768, 9, 1, "257M", "98k", "57M", 10.7e9, 1.78e-3),
    2: Level(768, 11, 1, "280M", "98k", "57M", 14.9e9, 1.50e-3),
    3: Level(1024, 11, 1, "407M", "131k", "134M", 24.3e9, 1.35e-3),
    4: Level(1024, 14, 1, "465M", "197k", "201M", 34.0e9, 1.24e-3),
    5: Level(1280, 14, 1, "658M", "246k", "393M", 52.8e9, 1.20e-3),
    6: Level(1536, 15, 1, "847M", "295k", "679M", 81.0e9, 0.99e-3),
    8: Level(1920, 21, 2, "1.48B", "614k", "553M", 168.4e9, 0.87e-3),
    13: Level(3840, 38, 2, "8.14B", "2.2M", "7.963B", 1.141e12, 0.50e-3),
}

# Levels at which the table's parameters, and with them its ratio of state to parameters, are those of one layer less
# than its number of layers.
ONE_LAYER_LESS = (1, 3)


def ladder(level: int, global_layer: str | list[str] = "sdm", **overrides: object) -> SDMConfig:
    """The configuration of a level of the paper's ladder (1-6, 8, 13).

    Args:
        level: the row of the table.
        global_layer: as in `SDMConfig`; everything else stays the same, so that models can be compared.
        overrides: other fields of `SDMConfig`.

    The number of layers is the table's; at levels 1 and 3 the table's number of parameters is that of one layer less.
    Full attention has half as many key-value heads as heads, which 15 heads do not allow: level 8 has 5, a group of 3.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(map(str, LEVELS))}, got {level!r}")
    row = LEVELS[level]
    fields: dict[str, Any] = {
        "vocab_size": 128_256,
        "hidden_size": row.hidden_size,
        "num_hidden_layers": row.num_hidden_layers,
        "global_layer": global_layer,
        "num_memory_heads": row.num_memory_heads,
        "head_dim": 128,
        "intermediate_multiple": 1024,
        **overrides,
    }
    return SDMConfig(**fields)
