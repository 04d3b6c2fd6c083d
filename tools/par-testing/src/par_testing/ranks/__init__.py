"""From a test body to the ranks that run it: a fresh world of processes for every test.

Data flows one way: `run` makes a `job` out of the body, `world` starts its processes from the warm `forkserver`, every
`rank` loads and runs the body, and what became of it comes back as an outcome of the room `report`.
"""
