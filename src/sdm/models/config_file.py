"""What config.json holds, so that transformers can read a saved folder also where this package is not imported.

Its base class checks `layer_types` against a list of its own, so ours have a key of ours; and `auto_map` names a small
file beside config.json that imports this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from sdm.files import write_bytes

_LAYER_TYPES = "sdm_layer_types"
_CODE = "modeling_sdm"
_AUTO_MAP = {
    "AutoConfig": f"{_CODE}.SDMConfig",
    "AutoModel": f"{_CODE}.SDMModel",
    "AutoModelForCausalLM": f"{_CODE}.SDMForCausalLM",
    "AutoModelForSequenceClassification": f"{_CODE}.SDMForSequenceClassification",
    "AutoModelForTokenClassification": f"{_CODE}.SDMForTokenClassification",
}


def to_file(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate the fields of a configuration into what config.json holds."""
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


def check_attention_implementation(fields: Mapping[str, Any]) -> None:
    """Refuse a config.json that names an attention kernel outside of the installed packages.

    transformers takes "owner/kernel" for a kernel on a hub, downloads it and runs it. The same happens to
    "flash_attention_2" where flash-attn is missing. This function is for the configuration of any model, and looks into
    nested configurations too; it needs no network.

    Args:
        fields: the content of config.json.

    Raises:
        ValueError: if `_attn_implementation` or `attn_implementation` names anything but an installed implementation.
    """
    builtin = ["eager", "sdpa", "flex_attention"]
    builtin += ["flash_attention_2"] if is_flash_attn_2_available() else []
    builtin += ["flash_attention_3"] if is_flash_attn_3_available() else []
    for name, value in fields.items():
        name = str(name)  # id2label has integers
        if name.endswith("attn_implementation") or "attn_implementation_" in name:
            # transformers takes a dictionary too, with an implementation for each nested configuration.
            for implementation in value.values() if isinstance(value, Mapping) else [value]:
                if implementation is not None and implementation not in builtin:
                    raise ValueError(
                        f"{name} must be one of {', '.join(builtin)}, got {implementation!r}: kernels are not taken "
                        "from a hub; remove the field"
                    )
        elif isinstance(value, Mapping):
            check_attention_implementation(value)


def write_code(folder: str | PathLike[str]) -> None:
    """Put the file that `auto_map` names into a folder."""
    code = Path(__file__).with_name("remote_code.py")
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_bytes(Path(folder) / f"{_CODE}.py", code.read_bytes())
