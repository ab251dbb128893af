"""Fits, tables, charts and pages: data in, numbers or pictures out."""
