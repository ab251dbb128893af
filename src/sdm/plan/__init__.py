"""Plans: what a training step takes on accelerators that are not at hand, in memory, traffic and time."""

from sdm.plan.estimate import ACCELERATORS, Accelerator, Memory, Plan, Workload, make_plan, mesh_plans

__all__ = ["ACCELERATORS", "Accelerator", "Memory", "Plan", "Workload", "make_plan", "mesh_plans"]
