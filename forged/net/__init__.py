"""How bytes travel: frames, messages, connections, and the networks that carry them."""
