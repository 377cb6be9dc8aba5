"""What needs the host of the workers: slots, the memory that outlives a worker."""
