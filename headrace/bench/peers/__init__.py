"""Headrace and other engines side by side: the same weights, the same threads, the same work, by turns."""
