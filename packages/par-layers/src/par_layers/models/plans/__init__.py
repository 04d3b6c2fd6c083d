"""Content of a plan: styles for parts of a model, by the patterns of their names.

styles (the words) <- plans (from patterns to one style for each name) <- families (better plans than models' own).
"""
