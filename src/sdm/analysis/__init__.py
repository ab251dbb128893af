"""Probes, tables and figures: data in, picture out."""
