"""`Strategy`: the order in which the packages of par are applied to a model.

Arguments flow from options and setup (before a model exists) over bundles, optimizers and stages into plugin and
plugins, which initialize applies to each bundle. In a step, batches feed execute; files and sample read the result.
"""
