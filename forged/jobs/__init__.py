"""Training jobs: what the daemon serves, each isolated from the others."""
