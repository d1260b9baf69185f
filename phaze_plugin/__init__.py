"""Phaze: the fastest way to train a model on many accelerators, found and proven."""

__all__ = ["__version__"]

__version__ = "0.1.0"
