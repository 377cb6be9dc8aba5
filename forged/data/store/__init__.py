"""Where a worker's shards are stored, and the origin that they come from."""
