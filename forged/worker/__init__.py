"""What lives in the training process: the worker, and how workers speak to each other."""
