"""Transfers of shards between workers: order, retries, bandwidth and progress."""
