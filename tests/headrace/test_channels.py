"""The table of channel options."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from headrace import channels

OPTIONS = {name for options in (channels.READER_OPTIONS, channels.SERVER_OPTIONS) for name, _ in options}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_option_exists(name: str) -> None:
    """GRPC ignores an option that it does not know; each of ours is a string in its library."""
    with Path(cygrpc.__file__).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        assert library.find(name.encode() + b"\0") >= 0
