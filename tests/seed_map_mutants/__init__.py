"""Break the code of each row that the seed map shows, and see that the row's test fails.

A mutant is a source edit under the name of its row. Tests run in a copy of the tree, so an interrupted run leaves no
broken source file behind.

    python -m tests.seed_map_mutants                 # all rows
    python -m tests.seed_map_mutants ClusterTopology # the rows whose declaration has this text
"""
