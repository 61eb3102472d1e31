"""The native decoder: where its files come from, what its config means, its forward pass and its weights."""
