"""Emitters: a plan in, something the framework runs out."""
