"""Tools that train: each target writes a plan as files of one tool, and reads such files back as a strategy."""
