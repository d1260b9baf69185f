"""The search over accelerators: bounds that prune, executors, a journal."""
