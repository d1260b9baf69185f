"""StableHLO modules into training graphs: what the frontends for JAX and for HLO files share.

A module passes through these files in this order:

mlir_reader.py            jaxlib's MLIR into a plain document, which can be sent between processes
module.py                 the document as typed values: functions, regions, operations; the flops of its products
interpreter.py            `main` is run on symbols: calls are inlined, loops are run, ops are recorded
symbols.py                the symbols, and the recorder of ops; `op_rules/` has a rule for every operation
constant_folding.py       numbers that follow from numbers, such as the counter of a loop
argument_roles.py         which arguments are parameters, batch or optimizer state, and which results are gradients
dataflow.py               which op makes and reads which tensor, the phase of every op, what forward keeps for backward
name_scopes.py            the names of JAX's locations and pytree paths, read word by word
module_paths.py           the module path of every op, from which layers follow
vector_fusion.py          vector ops joined into as few as a compiler would make of them
partitioned_modules.py    modules for several devices: their shardings, their strategy, the program made whole again
batch_and_expert_dims.py  batch factors, followed from the batch arguments, and the dimensions that count experts
training_graph.py         all of these steps in order, to a verified graph
"""
