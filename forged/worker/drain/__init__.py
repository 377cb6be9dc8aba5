"""How a worker leaves in good order."""
