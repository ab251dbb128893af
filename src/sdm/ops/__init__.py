"""Functions on tensors. Needs torch and nothing else."""

from sdm.ops.backends import available_backends
from sdm.ops.gated_delta_rule import gated_delta_rule, gated_delta_step_
from sdm.ops.product_key import product_key_topk
from sdm.ops.slot_attention import slot_attention, slot_attention_step_
from sdm.ops.sparse_delta_map import sparse_delta_map
from sdm.ops.sparse_delta_rule import sparse_delta_rule, sparse_delta_rule_, sparse_delta_step_
from sdm.ops.state_space import state_space, state_space_step_

__all__ = [
    "available_backends",
    "gated_delta_rule",
    "gated_delta_step_",
    "product_key_topk",
    "slot_attention",
    "slot_attention_step_",
    "sparse_delta_map",
    "sparse_delta_rule",
    "sparse_delta_rule_",
    "sparse_delta_step_",
    "state_space",
    "state_space_step_",
]
