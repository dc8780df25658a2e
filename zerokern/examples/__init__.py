"""A complete training job, to run and to learn from: `python -m
zerokern.examples.train`."""
