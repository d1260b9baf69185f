"""The paper's own placement program, counted exactly as the paper counts."""
