"""The layer types, a file each, and their fields in one class.

Local types come first wherever they are listed. To add a type, name it in the loop below and, if it has fields, name
its class of fields among the bases of `LayerFields`.
"""

from dataclasses import dataclass

from sdm.models.layer_types.attention import FullAttentionFields, FullAttentionType, SlidingAttentionType, WindowFields
from sdm.models.layer_types.base import LAYER_TYPES, LayerType, layer_fields, layer_names, local_reach, register
from sdm.models.layer_types.deltanet import DeltaNetFields, DeltaNetType
from sdm.models.layer_types.fwpkm import FastWeightFields, FastWeightType
from sdm.models.layer_types.gdn import GatedDeltaNetFields, GatedDeltaNetType
from sdm.models.layer_types.kda import KimiFields, KimiType
from sdm.models.layer_types.mamba2 import Mamba2Type
from sdm.models.layer_types.pkm import ProductKeyFields, ProductKeyType
from sdm.models.layer_types.raven import RavenFields, RavenType
from sdm.models.layer_types.sdm import SparseMemoryFields, SparseMemoryType
from sdm.models.layer_types.token_shift import TokenShiftType

for kind in (
    SlidingAttentionType,
    TokenShiftType,
    SparseMemoryType,
    GatedDeltaNetType,
    DeltaNetType,
    KimiType,
    Mamba2Type,
    RavenType,
    FastWeightType,
    ProductKeyType,
    FullAttentionType,
):
    register(kind())


@dataclass
class LayerFields(
    WindowFields,
    SparseMemoryFields,
    GatedDeltaNetFields,
    DeltaNetFields,
    KimiFields,
    RavenFields,
    FastWeightFields,
    ProductKeyFields,
    FullAttentionFields,
):
    """The fields of the built-in layer types, which `SDMConfig` inherits."""


__all__ = ["LAYER_TYPES", "LayerFields", "LayerType", "layer_fields", "layer_names", "local_reach", "register"]
