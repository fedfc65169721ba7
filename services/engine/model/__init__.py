"""The decoder: configuration, weights, and the arithmetic of one step. Knows no requests and no blocks' fate."""
