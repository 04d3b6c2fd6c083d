"""Two pipelines of two ranks, whose gradients travel in bfloat16."""
# ruff: noqa: C408 - configs are written with dict()

ranks = 4
parallel = dict(
    data=dict(size=2),
    pipeline=dict(size=2),
)
pipeline = dict(schedule="eager_1f1b", microbatches=4)
gradient_handlers = [
    dict(type="YourGradientHandler"),
    dict(type="pipeline_shared"),
]
