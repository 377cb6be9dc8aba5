"""The files of a save: which rank writes what, the bytes in memory, and how they are written."""
