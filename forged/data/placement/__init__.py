"""Which worker should hold which shard, and which transfers that takes."""
