"""Object stores: what they are asked, how often, and what is done when they fail for a moment.

`store` is what every store can do, through fsspec; `s3` joins parts that several ranks have written, which not every
store can; `requests` says how many requests and bytes a save and a load take (pure).
"""
