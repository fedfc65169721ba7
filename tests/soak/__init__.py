"""Long runs that CI does not do: `make soak`."""
