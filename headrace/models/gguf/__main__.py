"""`python -m headrace.models.gguf FILE DIRECTORY`: one conversion, in a process that ends with it."""

import sys
from pathlib import Path

from headrace.models.errors import EXPLAINED, ImportFailed
from headrace.models.gguf.convert import convert

try:
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
except ImportFailed as failure:
    sys.stderr.write(f"{failure}\n")
    sys.exit(EXPLAINED)
