"""What a chosen pipeline takes: the order of its passes, their simulation, and the resulting placement."""
