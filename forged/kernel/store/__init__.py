"""Where decisions become durable: the port, and the stores behind it."""
