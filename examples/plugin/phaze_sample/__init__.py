"""A plugin for Phaze, to be read and copied."""
