"""Measurements on trained models: likelihood, likelihood by position, recall."""
