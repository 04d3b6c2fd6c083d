"""Stages: a model, cut into the parts that the ranks of a pipeline run.

`partition` says which layers make up which stage, by their number or by what `layer_costs` measures. `build_stage` then
makes this rank's stages: out of layers, `Lazy` ones among them, or, with `transformers`, out of a model as it is.
"""
