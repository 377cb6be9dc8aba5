"""The coordinator of one job: what happens to workers comes in, facts and writes go out."""
