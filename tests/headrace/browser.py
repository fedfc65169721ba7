"""A page as a browser draws it."""

from __future__ import annotations

import subprocess
from pathlib import Path


def opened(browser: str, page: Path, profile: Path) -> tuple[str, str]:
    """What a browser without network makes of a page, and what it says."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--proxy-server=127.0.0.1:9"]
    address = page.rename(page.with_suffix(".html")).as_uri()
    command = [browser, *options, f"--user-data-dir={profile}", "--dump-dom", address]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return ended.stdout, ended.stderr
