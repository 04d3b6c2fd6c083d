"""Models as the planner reads them: `protocol` lists the questions, `gpt` answers by formulas.

`pretrained` answers for a Hugging Face Transformers model. All of them call `costs`; nothing here imports `prediction`.
"""
