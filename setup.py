"""The folder kernels/ installs as zerokern.kernels; everything else is in
pyproject.toml."""

from setuptools import setup

setup(
    packages=[
        "zerokern",
        "zerokern.kernels",
        "zerokern.sharding",
        "zerokern.checking",
        "zerokern.plan",
        "zerokern.examples",
    ],
    package_dir={"zerokern.kernels": "kernels"},
)
