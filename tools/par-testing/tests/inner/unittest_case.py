"""A rank test where unittest, not pytest, calls the body."""

import unittest

import pytest


class TestCase(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_it(self):
        pass
