"""Training jobs: their names, settings and versions; each is isolated from all other jobs."""
