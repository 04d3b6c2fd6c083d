"""Settings of all tests here.

Property tests take their time on a busy machine, and are the same on every run of CI. Tensors are small, so torch's
threads would only wait for each other.
"""

import os

import torch
from hypothesis import settings

settings.register_profile("par", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("par")
torch.set_num_threads(1)
