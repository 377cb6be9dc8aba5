"""The store port, and the SQLite and in-memory stores that implement it."""
