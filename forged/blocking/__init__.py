"""Blocking classes made from async ones, and the event loop in a thread that they run on."""
