"""The layer types, a file each. Local ones come first wherever they are listed."""

from sdm.models.layer_types.attention import FullAttentionType, SlidingAttentionType
from sdm.models.layer_types.base import LAYER_TYPES, LayerType, layer_fields, layer_names, local_reach, register
from sdm.models.layer_types.deltanet import DeltaNetType
from sdm.models.layer_types.gdn import GatedDeltaNetType
from sdm.models.layer_types.mamba2 import Mamba2Type
from sdm.models.layer_types.pkm import ProductKeyType
from sdm.models.layer_types.sdm import SparseMemoryType
from sdm.models.layer_types.token_shift import TokenShiftType

for kind in (
    SlidingAttentionType,
    TokenShiftType,
    SparseMemoryType,
    GatedDeltaNetType,
    DeltaNetType,
    Mamba2Type,
    ProductKeyType,
    FullAttentionType,
):
    register(kind())

__all__ = ["LAYER_TYPES", "LayerType", "layer_fields", "layer_names", "local_reach", "register"]
