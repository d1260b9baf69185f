"""The intermediate representation: ops, tensors, factor rules, layers."""
