"""Saving: from a state to a committed manifest."""
