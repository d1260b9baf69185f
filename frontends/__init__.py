"""Importers: a model in, a Graph out."""
