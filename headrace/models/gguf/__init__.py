"""Reads GGUF files: header, configuration, tokenizer, weights, each in a file of its own.

Imported only by the process that converts (see `headrace.models.gguf_import`): it loads torch, numpy, tokenizers and
the `gguf` package.
"""
