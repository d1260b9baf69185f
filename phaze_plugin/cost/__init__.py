"""What one op and one collective cost, vectorised over accelerators."""

from phaze.cost.estimate import BINDINGS, Binding, CoreKind, Estimate

__all__ = ["BINDINGS", "Binding", "CoreKind", "Estimate"]
