"""The worker's shards: holding them, fetching them, serving them, and counting their use."""
