"""Which worker holds which shard of a job."""
