"""The planner: from a model's sizes, a topology, a job and a machine to bytes, messages and seconds. Pure arithmetic.

`shape` and `inputs` are what goes in; `memory`, `traffic` and `pipeline` each count one thing for one rank. `model` is
what the planner asks of a model: `gpt` answers by formulas, `pretrained` for a model of transformers, with `kept` for
what autograd keeps of it. `predict` adds everything up for one configuration; `search` predicts every configuration of
a world; `report` says it in words.
`strategy_plan` uses the same formulas for models of which the parameters alone are known.
"""
