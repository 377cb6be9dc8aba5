"""Elastic training by the loops of other frameworks, which believe that they train alone."""
