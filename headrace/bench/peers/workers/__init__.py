"""What runs under each engine's own Python, and how it talks: `serving`."""
