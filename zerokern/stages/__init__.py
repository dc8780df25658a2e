"""The coordinators: when gradients are reduced and parameters gathered. No arithmetic
in here."""
