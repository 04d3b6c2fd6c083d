"""Stages: the parts of a model that the ranks of a pipeline run.

`partition` assigns layers to stages by their number or by the costs from `layer_costs`. `build_stage` then makes this
rank's stages, from layers (also `Lazy` layers) or, with `transformers`, from an unchanged model. If a model has no plan
of its stages, `trial` finds one, and `twins` makes the stages.
"""
