"""Object stores: requests, their number, and retries after temporary failures.

`store` has the operations that every store supports, through fsspec. `s3` joins parts that several ranks have written,
which only some stores support. `requests` computes the number of requests and bytes of a save and a load (pure).
"""
