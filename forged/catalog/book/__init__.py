"""What the daemon records of checkpoints, and what it answers: without I/O."""
