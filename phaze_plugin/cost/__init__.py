"""What one op and one collective cost, vectorised over accelerators."""
