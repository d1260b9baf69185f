"""Plugin seams: pluggy specifications and the one manager."""
