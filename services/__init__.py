"""The four processes and what they share."""
