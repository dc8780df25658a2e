"""Foresight: what a training run will hold, send and take, from the real code run on
fakes."""
