"""The worker's side of the checkpoint catalogue."""
