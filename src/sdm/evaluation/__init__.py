"""Measurements on trained models; `registry` lists them."""
