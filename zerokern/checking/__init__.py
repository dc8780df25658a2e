"""The guard for what nobody has thought of: a user's own steps in plain torch, beside
the same steps of a sharded optimizer."""
