"""The steps of a training script, and the exceptions in them."""
