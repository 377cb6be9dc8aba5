"""Where checkpoints are stored: local directories and object stores."""
