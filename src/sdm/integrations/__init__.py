"""Plugins for other programs: each imports its program only when that program loads it."""
