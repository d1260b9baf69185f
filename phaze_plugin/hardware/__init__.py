"""Accelerators, clusters and presets of real chips."""
