"""Property tests take their time on a busy machine, and are the same on every run of CI."""

import os

from hypothesis import settings

settings.register_profile("par", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("par")
