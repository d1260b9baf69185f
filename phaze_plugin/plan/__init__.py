"""The answer: what a plan says, saved and loaded as JSON, and handed to the target that runs it."""
