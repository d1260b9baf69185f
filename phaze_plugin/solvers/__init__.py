"""A neutral linear problem and the solvers that take it."""
