"""The transfer of training state from one worker to another."""
