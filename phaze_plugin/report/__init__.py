"""Plans as people read them: text for the terminal, HTML for notebooks."""
