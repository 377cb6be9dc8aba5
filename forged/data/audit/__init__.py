"""The audit: whether each sample of an epoch was used exactly once."""
