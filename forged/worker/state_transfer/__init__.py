"""Training state on its way from one worker to another."""
