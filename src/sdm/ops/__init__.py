"""Functions on tensors. Needs torch and nothing else."""

from sdm.ops.backends import available_backends
from sdm.ops.sparse_delta_rule import sparse_delta_rule, sparse_delta_step_

__all__ = ["available_backends", "sparse_delta_rule", "sparse_delta_step_"]
