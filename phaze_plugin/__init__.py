"""Phaze: the fastest way to train a model on many accelerators, found and proven."""
