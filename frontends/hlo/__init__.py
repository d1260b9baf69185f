"""HLO and StableHLO files into graphs."""
