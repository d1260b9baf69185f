"""Placement: stages, memory, pipeline schedules; the program over data x pipeline x tensor parallelism."""
