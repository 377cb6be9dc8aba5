"""A hostile tenant: one job's token does its worst while another job trains and an operator works."""
