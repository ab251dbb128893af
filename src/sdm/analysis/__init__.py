"""Probes, fits, tables and figures: data in, numbers or pictures out."""
