"""What config.json holds, so that transformers can read a saved folder also where this package is not imported.

Its base class checks `layer_types` against a list of its own, so ours have a key of ours; and `auto_map` names a small
file beside config.json that imports this package.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from sdm.files import write_bytes

_LAYER_TYPES = "sdm_layer_types"
_CODE = "modeling_sdm"
_AUTO_MAP = {
    "AutoConfig": f"{_CODE}.SDMConfig",
    "AutoModel": f"{_CODE}.SDMModel",
    "AutoModelForCausalLM": f"{_CODE}.SDMForCausalLM",
}


def to_file(fields: dict[str, Any]) -> dict[str, Any]:
    fields = {_LAYER_TYPES if name == "layer_types" else name: value for name, value in fields.items()}
    # A class of the user's own that is registered with transformers stays.
    return fields | {"auto_map": _AUTO_MAP | (fields.get("auto_map") or {})}


def from_file(fields: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `to_file`. Files of earlier versions are as they are."""
    fields = {"layer_types" if name == _LAYER_TYPES else name: value for name, value in fields.items()}
    others = {
        name: place
        for name, place in (fields.pop("auto_map", None) or {}).items()
        # transformers may have put the name of the repository in front.
        if str(place).rpartition("--")[2] != _AUTO_MAP.get(name)
    }
    return fields | {"auto_map": others} if others else fields


def write_code(folder: str | PathLike[str]) -> None:
    """Put the file that `auto_map` names into a folder."""
    code = Path(__file__).with_name("remote_code.py")
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_bytes(Path(folder) / f"{_CODE}.py", code.read_bytes())
