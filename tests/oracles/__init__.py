"""What the tests and benchmarks compare the product with: reference implementations and readers of published instances.

Nothing in the product imports this package.

- `numpy_reference`: what every function of the IR computes, written in numpy.
- `traffic_count`: the bytes that a plan sends in one step, counted from its collectives.
- `sampled_search`: Optuna's TPE on the space of a search for accelerators.
- `scale_sim`: cycles of a matrix product on one systolic array, as SCALE-Sim counts them.
- `scheduling_instances`, `placement_instances`: the published instances of the paper's two programs.
"""
