"""`Strategy`: the order in which the packages are applied to a model.

Read in this order: options (what can be said) -> setup (groups and schedule, before a model is there) -> pairs (which
optimizer trains what) -> optimizers (whether one sees what it needs) -> stages (what a pipeline rank has of a model) ->
existing (what to know of a model of transformers) -> plugin, plugins (what is done to a pair, one after the other) ->
handlers (what completes gradients) -> initialize (all of that, for one pair) -> execute (a batch in microbatches) ->
sample (text from a model in training) -> files -> strategy.
"""
