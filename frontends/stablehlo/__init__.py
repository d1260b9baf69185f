"""StableHLO into graphs: what the frontends for JAX and for HLO files share.

read.py      a module of jaxlib's MLIR into plain values (`module.py`), which can be sent between processes
walk.py      plain values into ops with rules: calls are inlined, loops run (`control.py`), constants folded (`tables/`)
roles.py     which arguments are parameters, batch or optimizer state, and which results are their gradients
phases.py    forward, backward, computed again, update
places.py    module paths: from name scopes, parameter paths and trips of scans
keeping.py   what backward keeps, and what it computes again inside its own ops
fusing.py    vector ops joined into as few as a compiler would make of them
assemble.py  all of it together, to a verified graph
"""
