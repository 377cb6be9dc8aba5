"""The worker's side of a rescale, and its progress in the training."""
