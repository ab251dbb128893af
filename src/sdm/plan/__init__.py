"""Plans: what a training step takes on accelerators that are not at hand, in memory, traffic and time."""

from sdm.plan.estimate import Plan, make_plan
from sdm.plan.memory import Memory
from sdm.plan.workload import ACCELERATORS, Accelerator, Workload

__all__ = ["ACCELERATORS", "Accelerator", "Memory", "Plan", "Workload", "make_plan"]
