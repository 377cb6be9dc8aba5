"""Loading: from a manifest to verified arrays."""
