"""One attempt at a rescale: its target world, its ranks and its learning rate."""
