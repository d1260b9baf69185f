"""The search for the fastest placement: over strategies, and over the stages of each."""
