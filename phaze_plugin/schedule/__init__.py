"""Operators of a layer on the cores of one accelerator."""
