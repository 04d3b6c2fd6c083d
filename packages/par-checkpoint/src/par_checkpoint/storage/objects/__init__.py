"""Object stores: requests, their number, and retries after temporary failures.

`store` is what every store can do, through fsspec; `s3` joins parts that several ranks have written, which not every
store can; `requests` says how many requests and bytes a save and a load take (pure).
"""
