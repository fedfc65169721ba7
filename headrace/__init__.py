"""Headrace: LLM inference over gRPC, for backend services."""
