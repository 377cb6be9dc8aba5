"""The files of checkpoints: what the daemon does with them, and how it reaches them."""
