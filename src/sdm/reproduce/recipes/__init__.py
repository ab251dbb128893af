"""Recipes: functions with typed parameters that return the full configuration of a run. `sdm train NAME` runs one."""

from sdm.reproduce.recipes.registry import RECIPES, recipe

__all__ = ["RECIPES", "recipe"]
