"""Targets: each turns a plan into something that one framework or tool runs."""
