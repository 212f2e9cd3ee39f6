"""The metadata is in setup.cfg; this file lets older tools build the package."""

from setuptools import setup

setup()
