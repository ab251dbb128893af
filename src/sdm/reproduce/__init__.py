"""Reproduce the paper: recipes, studies of many runs, and the commands of the paper's own experiments."""
