"""Frontends: each takes a model in one form (torch, JAX, HLO, config, saved graph) and returns its Graph."""
