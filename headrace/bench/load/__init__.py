"""The load of a run: which requests, how long, when they are due, and the processes that make them."""
