"""The gateway: the public API. Speaks the contract's messages; knows no token's text, no KV block and no torch."""
