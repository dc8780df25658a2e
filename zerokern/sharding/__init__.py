"""One optimizer on one rank: gradients, parameters, updates, and when each travels."""
