"""The memory of one device: blocks and holes, eviction, compaction, and the pool for programs without a daemon."""
